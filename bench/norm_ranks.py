"""What each of the two ranks does to measure norm and clip."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hyper_parallel
from hpcli.launch.context import RankContext
from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_

SHRINK = 0.999
"""What every call clips by: little enough that gradients are still ordinary numbers after hundreds of calls."""
ROUNDS = 5

Clip = Callable[[Sequence[torch.Tensor], float], Any]


class Matrices(nn.Module):
    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(shape)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.stack([matrix.square().sum() for matrix in self.matrices]).sum()


class Gradients:
    """Parameters whose gradients every call scales by SHRINK: the bound follows the norm down."""

    def __init__(self, parameters: Sequence[torch.Tensor], norm: float | None = None) -> None:
        self.parameters = parameters
        if norm is not None:
            self.norm = norm
            return
        parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        total = torch.stack([part.double().square().sum() for part in parts if part is not None]).sum()
        if isinstance(parameters[0], DTensor):
            dist.all_reduce(total)
        self.norm = float(total.sqrt())

    def clipped_by(self, clip: Clip) -> Callable[[], None]:
        def call() -> None:
            self.norm *= SHRINK
            clip(self.parameters, self.norm)

        return call


def run(context: RankContext, payload: dict[str, Any]) -> None:
    hyper_parallel.init(init_method=context.init_method, rank=context.rank, world_size=context.world_size)
    mesh = init_device_mesh("cpu", (context.world_size,))
    for number, (case, count, shape, ours, theirs) in enumerate(payload["cases"]):
        context.progress(number + 1, "gradient norm")
        if context.rank == 0:
            cold = ", and torch's first call, which takes a while" if number == 0 else ""
            context.emit({"event": "progress", "text": f"{case} on {context.world_size} ranks{cold}"})
        torch.manual_seed(0)
        model = Matrices(count, tuple(shape))
        fully_shard(model, mesh=mesh)
        model().backward()
        least = _case(list(model.parameters()), ours, theirs, first=number == 0)
        context.emit({"event": "minima", "case": case, "seconds": least})
    dist.barrier()
    dist.destroy_process_group()


def _case(parameters: list[torch.Tensor], ours: int, theirs: int, *, first: bool) -> dict[str, float]:
    gradients = Gradients(parameters)
    measured = {"ours_first": least_time(gradients.clipped_by(clip_grad_norm_), 1)}
    if first:
        measured["torch_first"] = least_time(gradients.clipped_by(torch.nn.utils.clip_grad_norm_), 1)
    _alternate(measured, gradients, "", ours, theirs)
    if first:
        for parameter in parameters:  # each gradient in a storage of its own
            parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
        _alternate(measured, Gradients(parameters), "_own", ours, theirs)
        plain = [p.grad.to_local().clone().requires_grad_() for p in parameters if isinstance(p.grad, DTensor)]
        for tensor in plain:
            tensor.grad = tensor.detach().clone()
        _alternate(measured, Gradients(plain), "_plain", ours, theirs)
    return measured


def _alternate(measured: dict[str, float], gradients: Gradients, kind: str, ours: int, theirs: int) -> None:
    """Measure in turns, so that a busy spell meets all."""
    calls = [(f"ours{kind}", gradients.clipped_by(clip_grad_norm_), ours)]
    if theirs:
        calls.append((f"torch{kind}", gradients.clipped_by(torch.nn.utils.clip_grad_norm_), theirs))
    if not kind:
        calls.append(("floor", _Floor(gradients.parameters), ours))
    for _, call, _ in calls:
        call()
    for _ in range(ROUNDS):
        for name, call, repetitions in calls:
            measured[name] = min(least_time(call, repetitions // ROUNDS + 1), measured.get(name, math.inf))


class _Floor:
    """The least that a norm and a clip can be: one reading pass, one gather, one reading and writing pass."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        elements = sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor))
        self.flat = torch.randn(elements)
        self.parts = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        self.scale = torch.tensor(SHRINK)

    def __call__(self) -> None:
        mine = torch.linalg.vector_norm(self.flat).double().view(1)
        dist.all_gather_single(self.parts, mine)
        self.flat.mul_(self.scale)


def least_time(call: Callable[[], None], repetitions: int) -> float:
    """The least processor time that the calling thread spends on a call, in seconds; all ranks begin each one together. (The
    threads with which gloo moves data are left out: they work as much for the floor and for torch.)"""
    least = math.inf
    for _ in range(repetitions):
        dist.barrier()
        began = time.thread_time()
        call()
        least = min(least, time.thread_time() - began)
    return least
