"""What one class of ranks holds of a model's parameters, by the shard rule and the units that training uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from typing import NamedTuple

from hpcli.config.schema import Config
from hpcli.models.parallel import parallel_plan
from hpcli.models.stages import HeldStages, StageLayers, held_stages, stage_shapes
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_layout import V_SCHEDULES
from hyper_parallel.core.precision import ITEM_SIZES
from hyper_parallel.core.sharding import ShardSizes, chunk_size, parameter_cuts, shard_sizes
from hyper_parallel.core.units import sharded_units

_LAYER = re.compile(r"^((?:vision\.)?layers)\.\d+\.")


class HeldUnit(NamedTuple):
    """One sharded unit on one rank, in elements.

    Attributes:
        ranks: over which it is sharded.
        layers: of the stage, between which it is in use.
        experts, root: what kind of unit it is.
        parameters: how many there are.
        held: of this rank's own pieces.
        shard: of the padded shards.
        trainable_shard, trainable_held: those of them that get gradients, padded and not.
        unsharded, trainable: of the parameters while they are gathered, and those of them that train.
        sharded_inside: padded elements of parameters that are cut along another dimension than the first.
    """

    ranks: int
    layers: range
    experts: bool
    root: bool
    parameters: int
    held: int
    shard: int
    trainable_shard: int
    trainable_held: int
    unsharded: int
    trainable: int
    sharded_inside: int

    @property
    def gathered(self) -> int:
        """Elements that an all-gather brings together: the padded shards of all its ranks."""
        return self.shard * self.ranks

    @property
    def trainable_gathered(self) -> int:
        """Elements of the buffer that a reduce-scatter takes in."""
        return self.trainable_shard * self.ranks


class HeldStage(NamedTuple):
    """One stage on one rank.

    Attributes:
        trained: elements with optimizer state; a local copy of a tied matrix has none.
        trained_parameters: how many parameters these are.
    """

    number: int
    layers: StageLayers
    units: list[HeldUnit]
    trained: int
    trained_parameters: int


class RankClass(NamedTuple):
    """Ranks that hold as much of everything.

    Attributes:
        ranks: how many there are.
        example: the lowest of them.
        pp: pipeline ranks that belong to it.
        dp_shard, tp: positions on these axes.
    """

    ranks: int
    example: int
    pp: tuple[int, ...]
    dp_shard: range
    tp: range


class _Model:
    """What follows from a configuration and takes time to find out."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.plan = parallel_plan(config)
        self._shapes: dict[StageLayers, dict[str, tuple[int, ...]]] = {}

    def shapes(self, stage: StageLayers) -> dict[str, tuple[int, ...]]:
        """The parameters of a stage."""
        if stage not in self._shapes:
            self._shapes[stage] = stage_shapes(self.config.model, stage)
        return self._shapes[stage]


_latest: list[_Model] = []


def _model(config: Config) -> _Model:
    """The model of ``config``, found out once for all ranks."""
    if not _latest or _latest[0].config is not config:
        _latest[:] = [_Model(config)]
    return _latest[0]


def stages_on(config: Config, mesh: ParallelMesh, pp_rank: int) -> HeldStages:
    """The stages of a pipeline rank."""
    return held_stages(config.model, config.parallelism, mesh, pp_rank)


def held_by(config: Config, mesh: ParallelMesh, rank: int) -> list[HeldStage]:
    """What ``rank`` holds, stage by stage."""
    held = stages_on(config, mesh, mesh.coordinates(rank)["pp"])
    local_tie = mesh.pp > 1 and config.parallelism.pipeline_parallel_schedule in V_SCHEDULES
    return [
        _hold(config, mesh, rank, index, stage, local_tie)
        for index, stage in zip(held.indices, held.stages, strict=True)
    ]


def is_frozen(config: Config, name: str, stage: StageLayers) -> bool:
    """Whether a parameter of ``stage`` does not train; a tied head is frozen with its embedding."""
    tied = name == "head.weight" and config.model.tie_embeddings
    source = "embedding.weight" if tied and not stage.first else name
    return any(fnmatchcase(source, pattern) for pattern in config.model.freeze)


def _hold(
    config: Config, mesh: ParallelMesh, rank: int, index: int, stage: StageLayers, local_tie: bool
) -> HeldStage:
    plan, shapes = _model(config).plan, _model(config).shapes(stage)
    item_size = ITEM_SIZES[config.training.compute_dtype]
    known: dict[str, tuple[ShardSizes, bool]] = {}
    trained = trained_parameters = 0
    units = []
    elements = {name: prod(shape) for name, shape in shapes.items()}
    apart = config.platform == "mindspore"
    for unit in sharded_units(plan, elements, item_size, recomputed_apart=apart):
        ranks = mesh.dp_shard // mesh.ep if unit.experts else mesh.dp_shard
        sums = [0] * 7
        for name in unit.names:
            kind = _LAYER.sub(r"\1.0.", name)  # what a layer's number changes is who holds it
            if kind not in known:
                cuts = parameter_cuts(plan, mesh, name, rank)
                known[kind] = shard_sizes(shapes[name], cuts), bool(cuts[-1].dim)
            (held, shard, unsharded), cut_inside = known[kind]
            trains = not is_frozen(config, name, stage)
            values = (held, shard, shard * trains, held * trains, unsharded, unsharded * trains, shard * cut_inside)
            sums = [a + b for a, b in zip(sums, values, strict=True)]
            copy = name == "head.weight" and config.model.tie_embeddings and local_tie
            trained += held * (trains and not copy)
            trained_parameters += trains and not copy
        units.append(HeldUnit(ranks, unit.layers, unit.experts, unit.root, len(unit.names), *sums))
    return HeldStage(index, stage, units, trained, trained_parameters)


def rank_classes(config: Config, mesh: ParallelMesh) -> list[RankClass]:
    """The ranks by what the shard rule can tell apart: pipeline ranks, and where a cut that does not divide gives some ranks a
    shorter piece or none. Replicas, and what divides evenly, are alike."""
    tp_ranges = list(_between(_tensor_breaks(config, mesh), mesh.tp))
    classes = []
    for pp in range(mesh.pp):
        for shards in _between(_shard_breaks(config, mesh, pp), mesh.dp_shard):
            for tensor in tp_ranges:
                count = len(shards) * len(tensor) * mesh.dp_replicate
                example = mesh.rank_at(pp=pp, dp_shard=shards.start, tp=tensor.start)
                classes.append(RankClass(count, example, (pp,), shards, tensor))
    return classes


def _between(breaks: set[int], size: int) -> Iterator[range]:
    edges = [0, *sorted(b for b in breaks if 0 < b < size), size]
    for start, stop in pairwise(edges):
        yield range(start, stop)


def _breaks(size: int, ranks: int) -> set[int]:
    """The positions at which a cut's pieces become shorter."""
    full = size // chunk_size(size, ranks)
    return {full, full + 1}


def _tensor_breaks(config: Config, mesh: ParallelMesh) -> set[int]:
    plan = _model(config).plan
    breaks: set[int] = set()
    for shape, dim in {(s, plan.tensor_dim(n)) for n, s in _all_shapes(config, mesh)}:
        if dim is not None and shape[dim] % mesh.tp:
            breaks |= _breaks(shape[dim], mesh.tp)
    return breaks


def _shard_breaks(config: Config, mesh: ParallelMesh, pp_rank: int) -> set[int]:
    plan = _model(config).plan
    breaks: set[int] = set()
    for stage in stages_on(config, mesh, pp_rank).stages:
        for name, shape in _model(config).shapes(stage).items():
            if plan.is_expert(name):
                continue  # cut evenly, or refused
            size = shape[0]
            sizes = {size}
            if plan.tensor_dim(name) == 0:
                chunk = chunk_size(size, mesh.tp)
                sizes = {chunk, size - size // chunk * chunk} - {0}
            for local in sizes:
                if local % mesh.dp_shard:
                    breaks |= _breaks(local, mesh.dp_shard)
    return breaks


def _all_shapes(config: Config, mesh: ParallelMesh) -> Iterator[tuple[str, tuple[int, ...]]]:
    for pp_rank in range(mesh.pp):
        for stage in stages_on(config, mesh, pp_rank).stages:
            yield from _model(config).shapes(stage).items()
