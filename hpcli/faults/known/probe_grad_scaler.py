"""Ranks that share no mesh find an overflow each for themselves."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry

ENTRY = Entry(
    id="probe-grad-scaler",
    title="one stage skips a step for an overflow, the other takes it",
    kind="loss-scale",
    source="torch 2.13, measured",
    condition="2 pipeline stages, the scaled gradient is 1024 on stage 0 and infinite on stage 1: was the "
    "step taken, and the next scale",
    shown_by="stock",
    wrong=ByRank(([True, 1024.0], [False, 512.0])),
    right=[False, 512.0],
    how_we_know="an element of the model's gradient is infinite, so the step must not be taken, and the "
    "scale is halved: 1024 / 2",
    why="torch.amp.GradScaler looks for overflow among the gradients that it sees, and reduces the finding "
    "over the mesh of a DTensor at most. Stages and experts have meshes of their own, so some take the step "
    "and some do not, and their scales part. The global norm is the same bits on all ranks, and it is not "
    "finite exactly when some gradient is not.",
)


def right() -> list[Any]:
    import hyper_parallel
    from hyper_parallel.core.loss_scale import LossScaler

    scaler = LossScaler(scale=1024.0)
    norm = hyper_parallel.clip_grad_norm_([_weight()], 1024.0, mesh=hyper_parallel.ParallelMesh(pp=2)).item()
    taken = scaler.update(norm)
    return [taken, scaler.scale]


def wrong() -> list[Any]:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))  # makes its scale
    weight = _weight()
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    scaler.update()
    return [bool(weight.item()), scaler.get_scale()]


def _weight() -> Any:
    import torch.distributed as dist

    from hpcli.faults.parameters import plain

    return plain([1024.0 if dist.get_rank() == 0 else float("inf")])
