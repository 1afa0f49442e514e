"""What one rank sends and receives in a training step: which collective, over which ranks, how often, how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from hpcli.config.schema import Config
from hpcli.models.parallel import parallel_plan
from hpcli.models.stages import StageLayers, stage_shapes
from hpcli.plan.activations import FakeRuns
from hpcli.plan.memory import hidden_shape, micro_batches
from hpcli.plan.pipeline import Pipeline, gathers
from hpcli.plan.shards import HeldStage, held_by, is_frozen
from hpcli.train.engine import TOLD
from hpcli.train.precision import precision_policy
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.norm_exchange import RankRecord
from hyper_parallel.core.pipeline_layout import V_SCHEDULES
from hyper_parallel.core.precision import ITEM_SIZES
from hyper_parallel.core.sharding import parameter_cuts, shard_sizes

FLOAT64 = ITEM_SIZES["float64"]
FLOAT32 = ITEM_SIZES["float32"]


class Traffic(NamedTuple):
    """One kind of collective of one rank.

    Attributes:
        purpose: what it is for.
        collective: its kind; a transfer of the pipeline is a "send" and, on the other side, a "receive".
        axis: the axis of the mesh over which it goes.
        ranks: that take part.
        times: in a step.
        bytes: of the larger of its buffers on a rank, each time.
    """

    purpose: str
    collective: str
    axis: str
    ranks: int
    times: int
    bytes: int

    @property
    def volume(self) -> int:
        """Bytes in a step."""
        return self.times * self.bytes


def traffic(config: Config, mesh: ParallelMesh, rank: int, pipeline: Pipeline | None, runs: FakeRuns) -> list[Traffic]:
    """Everything that ``rank`` does in one step of training, with others of the same kind put together."""
    together: dict[tuple[str, str, str, int, int], int] = {}
    for purpose, collective, axis, ranks, times, size in _all(config, mesh, rank, pipeline, runs):
        if times and size and ranks > 1:
            key = (purpose, collective, axis, ranks, size)
            together[key] = together.get(key, 0) + times
    return [Traffic(*key[:4], times, key[4]) for key, times in together.items()]


def _all(config: Config, mesh: ParallelMesh, rank: int, pipeline: Pipeline | None, runs: FakeRuns) -> Iterator[Traffic]:
    stages = held_by(config, mesh, rank)
    pp_rank = mesh.coordinates(rank)["pp"]
    for stage in stages:
        yield from _fully_sharded(config, mesh, stage, gathers(config, mesh, pipeline, stage, pp_rank))
    for stage in stages:
        for sent, times in runs.stage(config, mesh, stage.layers).sent.items():
            ranks = mesh.tp if sent.axis == "tp" else mesh.ep
            purpose = "tensor parallel" if sent.axis == "tp" else "expert parallel"
            yield Traffic(purpose, sent.kind, sent.axis, ranks, times * micro_batches(config, mesh), sent.bytes)
    if mesh.pp > 1:
        yield from _pipeline(config, mesh, stages)
    yield from _completed_gradients(config, mesh, rank, stages)
    yield Traffic("loss", "all-gather", "all", mesh.world_size, 1, FLOAT64 * len(TOLD) * mesh.world_size)
    yield Traffic("gradient norm", "all-gather", "all", mesh.world_size, 1, record_bytes() * mesh.world_size)


def record_bytes() -> int:
    """What a rank tells about its gradients, whatever the model."""
    return FLOAT64 * len(RankRecord._fields)


def _fully_sharded(config: Config, mesh: ParallelMesh, stage: HeldStage, times: list[int]) -> Iterator[Traffic]:
    policy = precision_policy(config)
    compute, reduce = ITEM_SIZES[policy.compute_dtype], ITEM_SIZES[policy.resolved_reduce_dtype]
    for unit, gathered in zip(stage.units, times, strict=True):
        axis = "dpm" if unit.experts and mesh.ep > 1 else "dp_shard"
        yield Traffic("parameters", "all-gather", axis, unit.ranks, gathered, compute * unit.gathered)
        yield Traffic("gradients", "reduce-scatter", axis, unit.ranks, 1, reduce * unit.trainable_gathered)
        yield Traffic("gradients", "all-reduce", "dp_replicate", mesh.dp_replicate, 1, reduce * unit.trainable_shard)


def _pipeline(config: Config, mesh: ParallelMesh, stages: list[HeldStage]) -> Iterator[Traffic]:
    size = ITEM_SIZES[config.training.compute_dtype] * prod(hidden_shape(config, mesh))
    here = {stage.number for stage in stages}
    times = micro_batches(config, mesh)
    for stage in stages:
        if not stage.layers.last and stage.number + 1 not in here:
            yield Traffic("pipeline, activations", "send", "pp", 2, times, size)
            yield Traffic("pipeline, gradients", "receive", "pp", 2, times, size)
        if not stage.layers.first and stage.number - 1 not in here:
            yield Traffic("pipeline, activations", "receive", "pp", 2, times, size)
            yield Traffic("pipeline, gradients", "send", "pp", 2, times, size)


def _completed_gradients(config: Config, mesh: ParallelMesh, rank: int, stages: list[HeldStage]) -> Iterator[Traffic]:
    """What :func:`hyper_parallel.finish_gradients` adds up: one buffer of float32 for each group, with a note of each rank about each
    parameter and one more element."""
    plan = parallel_plan(config)

    def buffer(names: list[tuple[str, StageLayers]], ranks: int) -> int:
        sizes = [
            shard_sizes(stage_shapes(config.model, stage)[name], parameter_cuts(plan, mesh, name, rank)).held
            for name, stage in names
        ]
        return FLOAT32 * (sum(sizes) + len(sizes) * ranks + 1)

    trained = [
        (name, stage.layers)
        for stage in stages
        for name in stage_shapes(config.model, stage.layers)
        if not is_frozen(config, name, stage.layers)
    ]
    parts = [
        (name, stage)
        for name, stage in trained
        if (plan.in_region(name) or not plan.sees_whole_sequence(name))
        and plan.tensor_dim(name) is None
        and not plan.is_expert(name)
    ]
    if mesh.tp > 1 and parts:
        yield Traffic("gradients that are parts", "all-reduce", "tp", mesh.tp, 1, buffer(parts, mesh.tp))
    across = mesh.pp > 1 and config.model.tie_embeddings
    if across and config.parallelism.pipeline_parallel_schedule not in V_SCHEDULES:
        tied = [(n, s) for n, s in trained if (n == "embedding.weight" and s.first) or (n == "head.weight" and s.last)]
        if tied:
            yield Traffic("tied matrix", "all-reduce", "pp", 2, 1, buffer(tied, 2))
