"""Exact values through the real reducers, since no tolerance can tell a wrong reduce dtype from a right one.

``reduced`` has gradient 1 on the first data-parallel rank and 2^-10 on the second: 1.0009765625 in float32, 1 in bfloat16.
``accumulated`` has 256, 1 and 1 in three micro-batches of the first rank: 258 in float32, 256 in bfloat16. ``tensor`` has 1
on the first tensor-parallel rank and 2^-10 on the second, which are always added up in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel
from hpcli.config.schema import Config
from hpcli.train.precision import precision_policy
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan

_MICRO_BATCHES = (256.0, 1.0, 1.0)
_SECOND = 2.0**-10


class _Witness(nn.Module):
    """The gradient of each weight is the factor it was called with, in the dtype it is computed in."""

    def __init__(self) -> None:
        super().__init__()
        elements = dist.get_world_size()  # at least one for every shard
        self.enter = nn.Identity()  # where the sequence would be split; here each rank is told its part
        self.reduced, self.accumulated, self.tensor = (nn.Parameter(torch.zeros(elements)) for _ in range(3))

    def forward(self, reduced: float, accumulated: float, tensor: float) -> torch.Tensor:
        return (self.reduced * reduced + self.accumulated * accumulated + self.tensor * tensor).sum()


def witness(config: Config, mesh: ParallelMesh, device_type: str) -> dict[str, float]:
    """What the reducers make of the witnesses on this rank."""
    plan = ParallelPlan(layers=(), sequence_parallel=mesh.tp > 1, sequence_entrances=("enter",))
    model: Any = hyper_parallel.parallelize(
        _Witness().to(device_type), mesh, plan, precision_policy(config), device_type=device_type
    )
    rank, tp = mesh.data_parallel_rank(dist.get_rank()), mesh.coordinates(dist.get_rank())["tp"]
    for number, factor in enumerate(_MICRO_BATCHES):
        last = number == len(_MICRO_BATCHES) - 1
        model.set_requires_gradient_sync(last)
        reduced = {(0, 0): 1.0, (1, 0): _SECOND}.get((rank, tp), 0.0) if last else 0.0
        tensor = {(0, 0): 1.0, (0, 1): _SECOND}.get((rank, tp), 0.0) if last else 0.0
        model(reduced, factor if (rank, tp) == (0, 0) else 0.0, tensor).backward()
    hyper_parallel.finish_gradients(model, mesh)
    return {name: float(p.grad.to_local().flatten()[0]) for name, p in model.named_parameters()}
