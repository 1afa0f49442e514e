"""Gradients are clipped before they are reduced over the ranks."""

from __future__ import annotations

from hpcli.faults.entry import ByRank, Entry

ENTRY = Entry(
    id="diffusers-721",
    title="clipped inside no_sync, before the gradients are reduced",
    kind="pipeline",
    source="diffusers#721",
    condition="data parallelism over 2 ranks, gradient 5 on rank 0 and 7 on rank 1, the norm taken inside "
    "no_sync()",
    shown_by="stock",
    wrong=ByRank((5.0, 7.0)),
    right=12.0,
    how_we_know="gradients are summed over ranks here: 5 + 7 = 12; before that each rank has its own",
    why="In no_sync() the gradients of a rank are its own, for more micro-batches are to come. A norm taken "
    "there is another number on each rank, and clipping by it makes the replicas differ. The norm belongs "
    "after the last, synchronised backward.",
)


def right() -> float:
    import torch
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = torch.nn.Linear(1, 1, bias=False)
    hyper_parallel.fully_shard(model, mesh=ranks_mesh(2, 1))
    model(torch.tensor([5.0 + 2 * dist.get_rank()])).sum().backward()
    return hyper_parallel.clip_grad_norm_(model, 1.0).item()


def wrong() -> float:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    with model.no_sync():
        model(torch.tensor([5.0 + 2 * dist.get_rank()])).sum().backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
