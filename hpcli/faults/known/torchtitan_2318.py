"""Data parallelism averages, sharded data parallelism sums: norms that differ by the number of ranks."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="torchtitan-2318",
    title="replicated and sharded data parallelism differ by a factor",
    kind="pipeline",
    source="torchtitan#2318",
    condition="2 ranks with gradients 3 and 5 of one weight, the loss divided by the global batch already",
    shown_by="stock",
    wrong={"replicated (DDP)": 4.0, "sharded (FSDP2, factor 1)": 8.0},
    right={"replicated": 8.0, "sharded": 8.0},
    how_we_know="3 + 5 = 8 is the gradient of the whole loss; its mean over ranks is 4",
    why="The divide factor of FSDP2 was set to 1, since the loss is divided by the tokens of all ranks. DDP "
    "has no such factor, and goes on averaging. One model then has two norms, and a clip that was tuned for "
    "one layout is wrong in the other.",
)


def right() -> dict[str, float]:
    import torch

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    def norm(*sizes: int) -> float:
        model = hyper_parallel.fully_shard(torch.nn.Linear(1, 1, bias=False), mesh=ranks_mesh(*sizes))
        return _norm(model)

    return {"replicated": norm(2, 1), "sharded": norm(2)}


def wrong() -> dict[str, float]:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hpcli.faults.parameters import ranks_mesh

    sharded: Any = fully_shard(torch.nn.Linear(1, 1, bias=False), mesh=ranks_mesh())
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    replicated = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    return {"replicated (DDP)": _norm(replicated), "sharded (FSDP2, factor 1)": _norm(sharded)}


def _norm(model: Any) -> float:
    import torch
    import torch.distributed as dist

    from hyper_parallel import clip_grad_norm_

    model(torch.tensor([3.0 + 2 * dist.get_rank()])).sum().backward()
    return clip_grad_norm_(model, 100.0).item()
