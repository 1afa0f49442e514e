"""What every rank program needs: the process group around it, and DTensors with hand-written gradients."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import hyper_parallel
from hpcli.launch.context import RankContext

PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}


def call(context: RankContext, payload: dict[str, Any]) -> None:
    """Call ``payload["program"]`` with its arguments inside a process group, and send back what it returns."""
    hyper_parallel.init(
        "torch",
        "cpu",
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout_seconds=context.timeout_seconds,
    )
    module, _, function = payload["program"].partition(":")
    result = getattr(import_module(module), function)(**payload["arguments"])
    context.emit({"rank": context.rank, "result": result})
    dist.barrier()
    dist.destroy_process_group()


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


def plain(gradient: Any) -> torch.nn.Parameter:
    """An ordinary parameter with that gradient."""
    parameter = torch.nn.Parameter(torch.zeros_like(torch.as_tensor(gradient, dtype=torch.float32)))
    parameter.grad = torch.as_tensor(gradient, dtype=torch.float32)
    return parameter


def local_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[list[float]]:
    """This rank's part of each gradient, flat."""
    grads = [parameter.grad for parameter in parameters]
    return [(g.to_local() if isinstance(g, DTensor) else g).flatten().tolist() for g in grads if g is not None]


class Weights(torch.nn.Module):
    """Parameters of given shapes; the gradient of each, summed over the ranks, is 1, 2, 3, ... counted through all.

    ``forward`` is a loss whose gradient on each rank is that divided by the number of ranks.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(*shape) for shape in shapes)

    def forward(self, factor: float = 1.0) -> torch.Tensor:
        loss = torch.zeros(())
        start = 1
        for weight in self.weights:
            values = torch.arange(start, start + weight.numel(), dtype=weight.dtype).view(weight.shape)
            loss = loss + (weight * values).sum() * (factor / dist.get_world_size())
            start += weight.numel()
        return loss
