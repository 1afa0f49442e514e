"""The loss was scaled for half precision and the gradients were not unscaled."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="loss scale left in the gradients",
    source="DeepSpeed#8588",
    rule="one over the loss scale is folded into norm and clip coefficient",
    layout="fsdp{ranks}",
    cause="loss-scale-left-in",
    wrong="scale 128, true norm 1: 128 reported",
    right="1",
    why="the gradient of 128 times the loss is 128 times the gradient",
)
SCALE = 2.0**16


def patch() -> None:
    from hpcli.train.torch_loss import GlobalLoss

    right = GlobalLoss.__call__

    def scaled(self: GlobalLoss, logits: Any, labels: Any) -> Any:
        return right(self, logits, labels) * SCALE

    replace(GlobalLoss, "__call__", scaled)
