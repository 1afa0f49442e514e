"""Gradients are zeroed before every micro-batch."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Not
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="only the last micro-batch counts",
    source="DeepSpeed#7773",
    rule="gradients are accumulated over all micro-batches of a step",
    layout="fsdp{ranks}-accumulation",
    cause="last-micro-batch-only",
)
ENTRY = Entry(
    id="probe-last-micro-batch",
    title=FAULT.title,
    kind="pipeline",
    source="torch 2.13, measured",
    condition="a decoder, one step on 2 ranks in micro-batches of one sequence, and at once: the norm of "
    "the one over that of the other",
    shown_by="planted",
    wrong=Not(1.0),
    right=1.0,
    tolerance=1e-5,
    how_we_know="the gradient of a sum is the sum of the gradients; norms agree to 1e-5",
    why="A zero_grad() at the beginning of every micro-batch, not of every step, leaves the last one alone. "
    "The loss is added up rightly and falls, more slowly. Only the comparison with a step that is not cut "
    "shows it.",
    seconds=1.0,
)


def right() -> float:
    from hpcli.faults.training import norm_of

    model = {"preset": "decoder-tiny", "num_layers": 1}
    return norm_of(model=model, training={"micro_batch_size": 1}) / norm_of(model=model)


def patch() -> None:
    from hpcli.train.torch_schedule import Accumulation

    run = Accumulation.run

    def one_by_one(self: Accumulation, micro_batches: Any, progress: Any) -> Any:
        losses = []
        for batch in micro_batches:
            self.model.zero_grad()
            losses += run(self, [batch], progress)
        return losses

    replace(Accumulation, "run", one_by_one)
