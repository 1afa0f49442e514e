"""FSDP averages gradients whose loss is already divided by the global batch."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="gradients averaged over ranks on top of the loss's own division",
    source="torchtitan#1842",
    rule="FSDP's divide factor is 1, its reduction a sum",
    layout="fsdp{ranks}",
    cause="averaged-not-summed",
    wrong="8 ranks: every gradient an eighth",
    right="the gradient of the mean over all tokens",
    why="the loss is divided by the tokens of all ranks; an average divides by the ranks once more",
)


def patch() -> None:
    from torch.distributed.fsdp import FSDPModule

    def default(self: Any, *arguments: Any) -> None:
        """FSDP2 left as it is: it divides by the number of ranks."""

    replace(FSDPModule, "set_gradient_divide_factor", default)
    replace(FSDPModule, "set_force_sum_reduction_for_comms", default)
