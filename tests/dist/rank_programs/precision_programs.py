"""Rank programs: which dtype the real reducer accumulates and reduces in, shown by numbers that only one dtype gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import hyper_parallel
from hyper_parallel import MixedPrecisionPolicy, OffloadPolicy, ParallelMesh


class Dot(torch.nn.Module):
    """Its gradient is its input, cast to the compute dtype."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((elements,), 1.0 + 2.0**-10))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [str(self.weight.dtype), self.weight[0].item()]
        return (self.weight * x).sum()


def reduced(
    mesh: dict[str, int], policy: dict[str, Any], per_rank: list[list[float]], offload: bool = False
) -> dict[str, Any]:
    """``per_rank``: each rank's gradients of its micro-batches. Returns what all elements of the reduced gradient are."""
    model = Dot(2 * dist.get_world_size())
    hyper_parallel.fully_shard(
        model,
        mesh=ParallelMesh(**mesh),
        mp_policy=MixedPrecisionPolicy(**policy),
        offload_policy=OffloadPolicy() if offload else None,
    )
    micro_batches = per_rank[dist.get_rank()]
    for index, gradient in enumerate(micro_batches):
        model.set_requires_gradient_sync(index == len(micro_batches) - 1)
        model(torch.full((2 * dist.get_world_size(),), gradient)).backward()
    local = model.weight.grad.to_local()
    return {
        "gradient": sorted(set(local.tolist())),
        "gradient dtype": str(local.dtype),
        "shard": [str(model.weight.dtype), model.weight.to_local()[0].item()],
        "seen": model.seen,
        "norm": hyper_parallel.clip_grad_norm_(model, 1e9).item(),
    }
