"""The modules of one rank: the whole model, or the pipeline stages that it holds, parallelised."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel
from hpcli.config.schema import Config
from hpcli.models.parallel import parallel_plan
from hpcli.models.stages import StageLayers, held_stages
from hpcli.models.torch.build import build_model
from hpcli.train.precision import precision_policy
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_layout import V_SCHEDULES
from hyper_parallel.core.precision import OffloadPolicy


class LocalTie(NamedTuple):
    """The two copies of a tied matrix on a rank that holds the first and the last stage.

    They are in two modules that are sharded by themselves, which cannot share a parameter: the second follows the first.
    """

    embedding: Any
    head: Any

    def add_up(self) -> None:
        """Both gradients into the embedding's."""
        if self.head.grad is not None:
            if self.embedding.grad is None:
                self.embedding.grad = self.head.grad
            else:
                self.embedding.grad.to_local().add_(self.head.grad.to_local())
            self.head.grad = None

    def follow(self) -> None:
        """The updated values into the head."""
        self.head.to_local().copy_(self.embedding.to_local())


class Parts(NamedTuple):
    """What this rank holds.

    Attributes:
        modules: the model, or its stages on this rank, ascending.
        stages: which part of the model each module is.
        indices: which stage each is.
        total: how many stages the whole model has.
        local_tie: where first and last stage of a tied model are both here.
    """

    modules: list[nn.Module]
    stages: list[StageLayers]
    indices: list[int]
    total: int
    local_tie: LocalTie | None

    def parameters(self) -> dict[str, Any]:
        """All parameters by their name in the whole model, a local copy of a tied one left out."""
        copies = {id(self.local_tie.head)} if self.local_tie else set()
        return {
            name: parameter
            for module in self.modules
            for name, parameter in module.named_parameters()
            if id(parameter) not in copies
        }


def build_parts(config: Config, mesh: ParallelMesh, device: torch.device) -> Parts:
    """Build, initialise and parallelise what this rank holds. Collective: process groups are made."""
    parallelism, model = config.parallelism, config.model
    pp_rank = mesh.coordinates(dist.get_rank())["pp"]
    indices, stages, total = held_stages(model, parallelism, mesh, pp_rank)
    fsdp = config.fsdp_config
    offload = OffloadPolicy(fsdp.pin_memory) if fsdp.enable_offload else None
    modules = []
    for stage in stages:
        module = build_model(model, config.training.seed, stage)
        if offload is None:
            module = module.to(device)
        plan, policy = parallel_plan(config), precision_policy(config)
        modules.append(hyper_parallel.parallelize(module, mesh, plan, policy, offload, device_type=device.type))
    schedule = parallelism.pipeline_parallel_schedule
    tie = _tie(modules, stages, mesh, schedule) if mesh.pp > 1 and model.tie_embeddings else None
    return Parts(modules, stages, indices, total, tie)


def _tie(modules: list[nn.Module], stages: list[StageLayers], mesh: ParallelMesh, schedule: str) -> LocalTie | None:
    """Tie the embedding of the first stage to the head of the last, wherever they are."""
    ends = zip(modules, stages, strict=True)
    tied = [
        module.get_parameter("embedding.weight" if stage.first else "head.weight")
        for module, stage in ends
        if stage.first or stage.last
    ]
    if schedule in V_SCHEDULES:
        return LocalTie(*tied) if tied else None
    for column in mesh.groups("pp"):  # every rank makes every group
        group = dist.new_group([column[0], column[-1]])
        if dist.get_rank() in (column[0], column[-1]) and tied[0].requires_grad:
            hyper_parallel.mark_shared(tied[0], group)
    return None
