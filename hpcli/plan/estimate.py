"""The whole plan of a configuration: every class of ranks, what each needs, and whether that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hpcli.config.schema import Config
from hpcli.plan.activations import FakeRuns
from hpcli.plan.memory import SHARDS, Memory, rank_memory
from hpcli.plan.pipeline import Pipeline, pipeline_of
from hpcli.plan.shards import RankClass, held_by, rank_classes
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_parallel.simulate import peak_in_flight


class Limits(NamedTuple):
    """What there is: bytes of a device and of a host, and how many ranks share a host."""

    device: int
    host: int
    ranks_per_host: int


class ClassNeeds(NamedTuple):
    """What every rank of a class needs, in bytes."""

    ranks: RankClass
    memory: Memory
    offload: bool

    @property
    def host(self) -> int:
        """Of host memory: the shards and what belongs to them, with offload."""
        return sum(getattr(self.memory, kind) for kind in SHARDS) * self.offload

    @property
    def never_at_once(self) -> int:
        """Of device memory: reduced gradients come as activations and whole gradients go, so the smaller sum never adds to the
        larger."""
        memory = self.memory
        return 0 if self.offload else min(memory.gradients, memory.activations + memory.main_gradients)

    @property
    def device(self) -> int:
        """Of device memory at the worst moment: everything else."""
        return self.memory.total - self.host - self.never_at_once


@dataclass(frozen=True)
class Plan:
    """What a configuration needs; ``classes`` by descending need of device memory."""

    config: Config
    mesh: ParallelMesh
    limits: Limits
    classes: list[ClassNeeds]
    pipeline: Pipeline | None

    @property
    def worst(self) -> ClassNeeds:
        """The class that needs most."""
        return self.classes[0]

    @property
    def host_total(self) -> int:
        """Bytes that the ranks of one host need of its memory together, at most."""
        ranks = min(self.limits.ranks_per_host, self.mesh.world_size)
        return ranks * max(needs.host for needs in self.classes)

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have enough."""
        return self.worst.device <= self.limits.device and self.host_total <= self.limits.host


def make_plan(config: Config, mesh: ParallelMesh, limits: Limits, runs: FakeRuns) -> Plan:
    """Work out what every class of ranks needs. Nothing is allocated and no process started."""
    pipeline = pipeline_of(config, mesh)
    offload = config.fsdp_config.enable_offload
    found: dict[tuple[Memory, range, range], ClassNeeds] = {}
    for ranks in rank_classes(config, mesh):
        needs = ClassNeeds(ranks, _memory(config, mesh, ranks, pipeline, runs), offload)
        key = (needs.memory, ranks.dp_shard, ranks.tp)
        same = found.get(key)
        if same is not None:  # pipeline ranks that need as much
            together = same.ranks._replace(ranks=same.ranks.ranks + ranks.ranks, pp=same.ranks.pp + ranks.pp)
            needs = same._replace(ranks=together)
        found[key] = needs
    classes = sorted(found.values(), key=lambda needs: (-needs.device, -needs.host, needs.ranks.example))
    return Plan(config, mesh, limits, classes, pipeline)


def _memory(config: Config, mesh: ParallelMesh, ranks: RankClass, pipeline: Pipeline | None, runs: FakeRuns) -> Memory:
    stages = held_by(config, mesh, ranks.example)
    micro_batches = {stage.number: runs.stage(config, mesh, stage.layers) for stage in stages}
    if pipeline is None:
        activations = micro_batches[0].saved
    else:
        activations = peak_in_flight(pipeline.schedule, ranks.pp[0], lambda number: micro_batches[number].saved)
    temporary = max(one.temporary for one in micro_batches.values())
    return rank_memory(config, mesh, ranks.example, activations, temporary)


def class_of(plan: Plan, rank: int) -> ClassNeeds:
    """The class that ``rank`` belongs to."""
    at = plan.mesh.coordinates(rank)
    for needs in plan.classes:
        ranks = needs.ranks
        if at["pp"] in ranks.pp and at["dp_shard"] in ranks.dp_shard and at["tp"] in ranks.tp:
            return needs
    raise ValueError(f"rank {rank} is in no class of the plan")
