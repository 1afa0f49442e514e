"""Offload pins memory by default, which needs an accelerator."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="probe-pinned-offload",
    title="offload's default fails on a machine without accelerator",
    kind="offload",
    source="torch 2.13, measured",
    condition="one weight sharded over 2 CPU ranks with the offload policy as it comes; gradient 3 on one "
    "shard, 4 on the other",
    shown_by="stock",
    wrong=Raises("Cannot access accelerator device when none is available"),
    right=5.0,
    how_we_know="sqrt(9 + 16) = 5",
    why="CPUOffloadPolicy() page-locks host memory, which is done by the driver of an accelerator. A "
    "configuration that was written for one then fails where it should be tried out. Here None pins where "
    "there is a device to copy to, and nowhere else.",
)


def right() -> float:
    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = _linear()
    hyper_parallel.fully_shard(model, mesh=ranks_mesh(), offload_policy=hyper_parallel.OffloadPolicy())
    return _norm(model)


def wrong() -> float:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from hpcli.faults.parameters import ranks_mesh

    model = _linear()
    fully_shard(model, mesh=ranks_mesh(), offload_policy=CPUOffloadPolicy())
    return _norm(model)


def _linear() -> Any:
    import torch

    return torch.nn.Linear(1, 2, bias=False)


def _norm(model: Any) -> float:
    import torch

    from hyper_parallel import clip_grad_norm_

    (model(torch.ones(1)) * torch.tensor([1.5, 2.0])).sum().backward()  # summed over 2 ranks
    return clip_grad_norm_(model, 1.0).item()
