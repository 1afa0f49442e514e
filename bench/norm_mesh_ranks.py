"""What each of four ranks does to measure norm and clip of parameters on several mesh axes and on several meshes.

Beside it stands what users of torchtitan write today: one ``get_total_norm`` per mesh, each reduced on its own, combined by hand, and
one ``clip_grads_with_norm_`` per mesh. (There is one pipeline stage here, which spares them one more reduction.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import hyper_parallel
from bench.norm_ranks import ROUNDS, Gradients, least_time
from hpcli.launch.context import RankContext
from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_

SIZE = 64


class Weights(nn.Module):
    """Parameters, and a loss that gives each a gradient."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)

    def forward(self) -> torch.Tensor:
        parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in self.weights]
        return torch.stack([part.square().sum() for part in parts]).sum()


def tensor_parallel() -> nn.Module:
    """120 matrices cut by columns, 120 by rows, 60 vectors on every tensor-parallel rank; all of it sharded over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))

    def on_tp(shape: tuple[int, ...], placement: Any) -> torch.Tensor:
        return distribute_tensor(torch.randn(shape), mesh["tp"], [placement])

    columns = [on_tp((SIZE, SIZE), Shard(0)) for _ in range(120)]
    rows = [on_tp((SIZE, SIZE), Shard(1)) for _ in range(120)]
    model = Weights([*columns, *rows, *(on_tp((SIZE,), Replicate()) for _ in range(60))])
    return fully_shard(model, mesh=mesh["dp_shard"])


def expert_parallel() -> nn.Module:
    """150 dense matrices sharded over four ranks, 50 stacks of 8 experts spread over two and sharded over two."""
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dpm", "ep"))
    stacks = [distribute_tensor(torch.randn(8, SIZE, SIZE // 4), experts["ep"], [Shard(0)]) for _ in range(50)]
    model = nn.ModuleList([Weights([torch.randn(SIZE, SIZE) for _ in range(150)]), Weights(stacks)])
    fully_shard(model[1], mesh=experts["dpm"], shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(model[0], mesh=dense)
    return model


CASES = {"tensor parallel x FSDP, 300": tensor_parallel, "experts beside dense, 200": expert_parallel}


def mesh_by_mesh(parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """The clip by hand."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = []
    for of_mesh in by_mesh.values():
        norm: Any = get_total_norm([p.grad for p in of_mesh if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).square().sum().sqrt()  # and, with a pipeline, an all-reduce of the squares over its ranks
    for of_mesh in by_mesh.values():
        clip_grads_with_norm_(of_mesh, max_norm, total)
    return total


logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # it warns of what it is here to show


def run(context: RankContext, payload: dict[str, Any]) -> None:
    hyper_parallel.init(init_method=context.init_method, rank=context.rank, world_size=context.world_size)
    for number, (case, make) in enumerate(CASES.items()):
        context.progress(number + 1, "gradient norm")
        if context.rank == 0:
            context.emit({"event": "progress", "text": f"{case} on {context.world_size} ranks"})
        torch.manual_seed(0)
        model = make()
        parts = list(model) if isinstance(model, nn.ModuleList) else [model]
        torch.stack([part() for part in parts]).sum().backward()
        parameters = list(model.parameters())
        gradients = Gradients(parameters, norm=float(clip_grad_norm_(parameters, float("inf"))))
        calls = {"ours": gradients.clipped_by(clip_grad_norm_), "by_hand": gradients.clipped_by(mesh_by_mesh)}
        measured = {name: least_time(call, 1) for name, call in calls.items()}  # warm
        for _ in range(ROUNDS):
            for name, call in calls.items():
                measured[name] = min(measured[name], least_time(call, payload["repetitions"] // ROUNDS + 1))
        context.emit({"event": "minima", "case": case, "seconds": measured})
    dist.barrier()
    dist.destroy_process_group()
