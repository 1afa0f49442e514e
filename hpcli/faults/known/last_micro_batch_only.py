"""Gradients are zeroed before every micro-batch."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="only the last micro-batch counts",
    source="DeepSpeed#7773",
    rule="gradients are accumulated over all micro-batches of a step",
    layout="fsdp{ranks}-accumulation",
    cause="last-micro-batch-only",
    wrong="two micro-batches with gradients 1 and 3: 3",
    right="4",
    why="1 + 3 = 4",
)


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
