"""Rank programs: pipelines made with the library's public names, and what a rank of the trainer's pipeline holds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel
from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import MixedPrecisionPolicy, ParallelMesh
from hyper_parallel.core.pipeline_layout import stages_of_rank
from hyper_parallel.platform.torch.pipeline import make_schedule

WIDTH = 4
STAGES_ON_A_RANK = {"gpipe": 1, "1f1b": 1}  # the others: 2


class Scale(nn.Module):
    """(B, WIDTH) times one weight per column, all ones at first: a weight's gradient is its column of the input, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def sum_of_outputs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.float().sum()


def witness(schedule: str, values: list[float], reduce_dtype: str | None, *, told_shapes: bool) -> dict[str, Any]:
    """A step of two pipeline ranks, each sharded over two, that computes in bfloat16: one micro-batch per value, which is all
    that its input holds on the first data-parallel rank; on the second the input is zero."""
    mesh = ParallelMesh(pp=2, dp_shard=2)
    here = mesh.coordinates(dist.get_rank())
    each = STAGES_ON_A_RANK.get(schedule, 2)
    indices = stages_of_rank(schedule, mesh.pp, each, here["pp"])
    policy = MixedPrecisionPolicy("float32", "bfloat16", reduce_dtype)
    modules = [
        hyper_parallel.fully_shard(Scale(), mesh=mesh, mp_policy=policy, reshard_after_forward=False) for _ in indices
    ]
    example = torch.empty(1, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    shapes = {"input_args": example, "output_args": example} if told_shapes else {}
    stages = [
        hyper_parallel.PipelineStage(module, index, 2 * each, torch.device("cpu"), mesh=mesh, **shapes)
        for module, index in zip(modules, indices, strict=True)
    ]
    pipeline = make_schedule(schedule, stages if each > 1 else stages[0], len(values), sum_of_outputs)
    whole = torch.tensor(values, dtype=torch.bfloat16).view(-1, 1).expand(-1, WIDTH).contiguous()
    if here["dp_shard"]:
        whole = torch.zeros_like(whole)
    first, last = 0 in indices, 2 * each - 1 in indices
    losses: list[torch.Tensor] = []
    with Communication() as counted:
        pipeline.step(
            *([whole] if first else []),
            target=whole if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
    return {
        "gradients": [module.weight.grad.full_tensor().tolist() for module in modules],
        "dtypes": sorted({str(module.weight.grad.dtype) for module in modules}),
        "loss": float(sum(losses)) if last else None,
        "reduce_scatters": counted.found["reduce_scatter"],
        "stages": len(modules),
    }


class Communication(TorchDispatchMode):
    """Counts c10d's operations by what their names contain."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace == "c10d":
            self.found["reduce_scatter"] += "reduce_scatter" in function._opname
        return function(*arguments, **(options or {}))


def refused(schedules: list[str]) -> list[str]:
    """What is said to schedules over stages of which a part frees its parameters after forward, and to a mesh without ``pp``."""
    mesh = ParallelMesh(pp=2)
    stages = []
    for index in (dist.get_rank(), 3 - dist.get_rank()):
        module = nn.Sequential(Scale(), Scale())
        hyper_parallel.fully_shard(module[1], mesh=mesh, reshard_after_forward=True)
        hyper_parallel.fully_shard(module, mesh=mesh, reshard_after_forward=False)
        stages.append(hyper_parallel.PipelineStage(module, index, 4, torch.device("cpu"), mesh=mesh))
    said = []
    for schedule in schedules:
        try:
            getattr(hyper_parallel, schedule)(stages, 4, sum_of_outputs)
        except ValueError as error:
            said.append(str(error))
    try:
        hyper_parallel.PipelineStage(Scale(), 0, 2, torch.device("cpu"), mesh=ParallelMesh(dp_shard=2))
    except ValueError as error:
        said.append(str(error))
    return said


def held(config: dict[str, Any], mesh: dict[str, int]) -> dict[str, Any]:
    """One step as the trainer does it: the names, sizes and phases that this rank had to do with."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    batches = make_batches(settings)
    share = batches.share(1, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
    phases: list[str] = []
    with Communication() as counted:
        result = engine.step(share.split(settings.training.micro_batch_size or 1), batches.valid_tokens(1), 1e-3, phases.append)
    return {
        "names": sorted(name for part in engine.parts for name, _ in part.named_parameters()),
        "allocated": sum(p.numel() for part in engine.parts for p in part.parameters()),
        "parameter_count": engine.parameter_count,
        "phases": phases,
        "loss": result.loss,
        "norm": result.grad_norm.hex(),
        "row": engine.rank_row(),
        "reduce_scatters": counted.found["reduce_scatter"],
        "gradients_left": sum(p.grad is not None for part in engine.parts for p in part.parameters()),
        "updates": engine.optimizer.updates,
    }


def norms_without_mesh() -> dict[str, float]:
    """Stages with gradients 3 and 4; ``parallelize`` knew the mesh, the clip is not told."""
    mesh = hyper_parallel.ParallelMesh(pp=2)
    stage = nn.Module()
    stage.weight = nn.Parameter(torch.zeros(1))
    hyper_parallel.parallelize(stage, mesh, hyper_parallel.ParallelPlan(layers=()))
    stage.forward = lambda: (stage.weight * (3.0 + dist.get_rank())).sum()
    stage().backward()
    forms = {"module": stage, "modules": [stage], "list": list(stage.parameters()), "generator": stage.parameters(), "tensor": stage.weight}
    return {name: hyper_parallel.clip_grad_norm_(form, math.inf).item() for name, form in forms.items()}
