"""Every data-parallel rank reads the first share of the batch."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="all ranks train on the same data",
    source="Automodel#3701",
    rule="each data-parallel rank has its own share of the global batch",
    layout="fsdp{ranks}",
    cause="same-data",
    wrong="N copies of one share: a norm that looks healthy",
    right="the gradient of the whole batch",
    why="the ranks' tokens are compared",
)


def patch() -> None:
    from hpcli.data.text import TextBatches

    share = TextBatches.share

    def first(self: TextBatches, step: int, index: int, shares: int) -> Any:
        return share(self, step, 0, shares)

    replace(TextBatches, "share", first)
