"""Gradients are clipped before they are unscaled."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="examples-1196",
    title="clipped before the loss scale is taken out",
    kind="loss-scale",
    source="pytorch/examples#1196",
    condition="one process, loss scale 1024, true gradient (3, 4), max_norm 1, one SGD step with lr 1 from "
    "zero: the norm, and the weights",
    shown_by="stock",
    wrong=[5120.0, -0.6 / 1024, -0.8 / 1024],
    right=[5.0, -0.6, -0.8],
    how_we_know="1024 x 5 = 5120; clipped to norm 1 and then divided by 1024, the step is 1/1024 of what "
    "was meant",
    why="scaler.step() unscales by itself, so a clip between backward and step sees scaled gradients. "
    "Nearly every step is then clipped, and divided by the scale on top. scaler.unscale_() goes before the "
    "clip; here the scale is part of the norm and nobody can forget it.",
    ranks=(1,),
)


def right() -> list[float]:
    from hyper_parallel import clip_grad_norm_
    from hyper_parallel.core.loss_scale import LossScaler

    scaler = LossScaler(scale=1024.0)
    weight, optimizer = _scaled(scaler.scale)
    norm = scaler.unscaled(clip_grad_norm_([weight], 1.0 * scaler.scale).item())
    weight.grad.div_(scaler.scale)
    optimizer.step()
    return [norm, *weight.tolist()]


def wrong() -> list[float]:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))  # makes its scale
    weight, optimizer = _scaled(1024.0)
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0).item()
    scaler.step(optimizer)
    return [norm, *weight.tolist()]


def _scaled(scale: float) -> Any:
    import torch

    weight = torch.nn.Parameter(torch.zeros(2))
    ((weight * torch.tensor([3.0, 4.0])).sum() * scale).backward()
    return weight, torch.optim.SGD([weight], lr=1.0)
