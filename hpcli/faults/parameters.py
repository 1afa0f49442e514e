"""Parameters with hand-written gradients, for the small cases in which faults are shown. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
AXES = ("a", "b", "c")


def ranks_mesh(*sizes: int) -> DeviceMesh:
    """A CPU mesh of that many axes, named a, b, c; one axis over all ranks where no size is given."""
    sizes = sizes or (dist.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])


def placed(placements: str) -> list[Placement]:
    """ "R S0": replicated on the first mesh axis, sharded on dimension 0 over the second."""
    return [PLACEMENTS[name] for name in placements.split()]


def with_gradient(gradient: Any, mesh: DeviceMesh, placements: str) -> torch.nn.Parameter:
    """A parameter of zeros on ``mesh`` whose whole gradient is ``gradient``, distributed alike."""
    whole = torch.as_tensor(gradient, dtype=torch.float32)
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placed(placements)))
    parameter.grad = distribute_tensor(whole, mesh, placed(placements))
    return parameter


def with_local_gradient(local: Any, mesh: DeviceMesh, placements: str) -> torch.nn.Parameter:
    """A parameter whose gradient on this rank is ``local``; the ranks need not agree."""
    gradient = torch.as_tensor(local, dtype=torch.float32)
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(gradient), mesh, placed(placements), run_check=False))
    parameter.grad = DTensor.from_local(gradient, mesh, placed(placements), run_check=False)
    return parameter


def plain(gradient: Any, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """An ordinary parameter with that gradient."""
    values = torch.as_tensor(gradient, dtype=dtype)
    parameter = torch.nn.Parameter(torch.zeros_like(values))
    parameter.grad = values
    return parameter


def local_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[list[float]]:
    """This rank's part of each gradient, flat."""
    grads = [parameter.grad for parameter in parameters]
    return [(g.to_local() if isinstance(g, DTensor) else g).flatten().tolist() for g in grads if g is not None]


def over_ranks(value: float, operation: str = "sum") -> float:
    """An all-reduce of one number: "sum", "avg", "max" or "min" over all ranks, in float64."""
    kept = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(kept, op=getattr(dist.ReduceOp, operation.upper()))
    return float(kept)


def squares(parameters: Sequence[torch.nn.Parameter]) -> float:
    """The sum of squares of all gradient elements on this rank, in float64."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(sum((g.to_local() if isinstance(g, DTensor) else g).double().square().sum() for g in grads))
