"""The norm of no gradients at all is no tensor."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="megatron-5529",
    title="a rank whose parameters are all filtered out has no norm",
    kind="missing",
    source="Megatron-LM#5529",
    condition="one process, all parameters filtered out (frozen, shared or a duplicate): the norm of type "
    "inf, and what type 2 gives to the all-reduce",
    shown_by="formula",
    wrong={"inf": Raises("max() ", "ValueError"), "2": "float"},
    right={"inf": 0.0, "2": "Tensor"},
    how_we_know="a maximum of magnitudes, and a sum of squares, start at 0",
    why="Without gradients max() meets an empty sequence, and the sum of squares is Python's number 0.0, "
    "which no all-reduce takes. Pipeline stages whose weights are all frozen or shared get there. The part "
    "of an empty list is a value like any other.",
    ranks=(1,),
)


def right() -> dict[str, Any]:
    from hyper_parallel import clip_grad_norm_

    return {"inf": clip_grad_norm_([], 1.0, "inf").item(), "2": type(clip_grad_norm_([], 1.0)).__name__}


def wrong() -> dict[str, Any]:
    from hpcli.faults.attempt import attempt

    gradients: list[Any] = []
    return {
        "inf": attempt(lambda: max(gradient.abs().max() for gradient in gradients)),
        "2": type(sum((gradient.norm() ** 2 for gradient in gradients), 0.0)).__name__,
    }
