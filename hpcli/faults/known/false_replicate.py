"""Gradients that sequence parallelism leaves in parts are taken as whole."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Not
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="partial gradients labelled as replicated",
    source="LLaMA-Factory#10640",
    rule="parameters with a part of their gradient on each tensor-parallel rank are added up by finish_gradients",
    layout="tp2+sp-fsdp{half}",
    cause="false-replicate",
)
ENTRY = Entry(
    id="probe-false-replicate",
    title=FAULT.title,
    kind="dtensor",
    source="torch 2.13, measured",
    condition="a decoder, one step on 2 ranks with tensor and sequence parallelism, and with sharded data "
    "parallelism: the norm of the norm weights' gradients, the one over the other",
    shown_by="planted",
    wrong=Not(1.0),
    right=1.0,
    tolerance=1e-5,
    how_we_know="the same batch and the same weights have one gradient; norms agree to 1e-5",
    why="With the sequence cut, each tensor-parallel rank sees half of the tokens, so it has half of a norm "
    "weight's gradient. A placement that says Replicate makes every norm skip the sum, and no collective "
    "ever notices. Such parameters must be declared, and added up.",
    seconds=1.0,
)


def right() -> float:
    whole = _norm_of_norm_weights({})
    return _norm_of_norm_weights({"tensor_parallel": 2, "sequence_parallel": True}) / whole


def _norm_of_norm_weights(parallelism: dict[str, Any]) -> float:
    from hpcli.faults.training import Trained
    from hyper_parallel import get_total_norm

    trained = Trained(model={"preset": "decoder-tiny", "num_layers": 1}, parallelism=parallelism)
    return get_total_norm([p.grad for name, p in trained.engine.parameters.items() if name.endswith("norm.weight")]).item()


def patch() -> None:
    from hyper_parallel.platform.torch import tensor_parallel

    def forgotten(parameter: Any, group: Any) -> None:
        """The parameter is left as it is labelled: replicated."""

    replace(tensor_parallel, "mark_shared", forgotten)
