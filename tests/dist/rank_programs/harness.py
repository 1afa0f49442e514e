"""What every rank program needs: the process group around it, and DTensors with hand-written gradients."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import hyper_parallel
from hpcli.faults.parameters import local_gradients, placed, plain, with_gradient, with_local_gradient
from hpcli.launch.context import RankContext

__all__ = ["Weights", "call", "local_gradients", "placed", "plain", "with_gradient", "with_local_gradient"]


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
