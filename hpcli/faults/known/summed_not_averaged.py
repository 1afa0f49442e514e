"""The loss is divided by the rank's share of the batch, and the gradients are summed over the ranks."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="gradients summed where the mean was meant",
    source="torchtitan#2318",
    rule="the loss is divided by the valid tokens of the global batch, gradients are summed",
    layout="fsdp{ranks}",
    cause="summed-not-averaged",
    wrong="8 ranks: every gradient 8 times too large",
    right="the gradient of the mean over all tokens",
    why="a sum over N ranks of means is N times the mean",
)


def patch() -> None:
    import torch.distributed as dist

    from hpcli.train.torch_loss import GlobalLoss

    right = GlobalLoss.__call__

    def of_own_share(self: GlobalLoss, logits: Any, labels: Any) -> Any:
        loss = right(self, logits, labels)
        loss_of_share = loss * dist.get_world_size()
        return loss_of_share

    replace(GlobalLoss, "__call__", of_own_share)
