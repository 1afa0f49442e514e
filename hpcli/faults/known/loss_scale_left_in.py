"""The loss was scaled for half precision and the gradients were not unscaled."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="loss scale left in the gradients",
    source="DeepSpeed#8588",
    rule="one over the loss scale is folded into norm and clip coefficient",
    layout="fsdp{ranks}",
    cause="loss-scale-left-in",
)
SCALE = 2.0**16
ENTRY = Entry(
    id="deepspeed-8588",
    title="the reported norm is still multiplied by the loss scale",
    kind="loss-scale",
    source=FAULT.source,
    condition="one process, loss scale 128, a true gradient of 1, max_norm 1: the norm that is reported, "
    "and the clipped true gradient",
    shown_by="formula",
    wrong=[128.0, 1 / 128],
    right=[1.0, 1.0],
    how_we_know="the gradient of 128 times the loss is 128 times the gradient; 1 / 128 of a gradient that "
    "needs no clipping is lost",
    why="Gradients are those of the scaled loss until somebody unscales them. A norm taken before is too "
    "large by the scale, which changes over time, and the bound it is compared with is in true units. Norm "
    "and coefficient must both carry one over the scale.",
    ranks=(1,),
)


def right() -> list[float]:
    from hyper_parallel import clip_grad_norm_
    from hyper_parallel.core.loss_scale import LossScaler

    scaler, weight = LossScaler(scale=128.0), _weight(128.0)
    norm = clip_grad_norm_([weight], 1.0 * scaler.scale).item()
    return [scaler.unscaled(norm), weight.grad.item() / scaler.scale]


def wrong() -> list[float]:
    from hyper_parallel import clip_grad_norm_

    weight = _weight(128.0)
    norm = clip_grad_norm_([weight], 1.0).item()
    return [norm, weight.grad.item() / 128.0]


def _weight(scale: float) -> Any:
    import torch

    weight = torch.nn.Parameter(torch.zeros(1))
    (weight.sum() * scale).backward()
    return weight


def patch() -> None:
    from hpcli.train.torch_loss import GlobalLoss

    right = GlobalLoss.__call__

    def scaled(self: GlobalLoss, logits: Any, labels: Any) -> Any:
        return right(self, logits, labels) * SCALE

    replace(GlobalLoss, "__call__", scaled)
