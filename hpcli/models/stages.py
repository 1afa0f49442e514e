"""Which part of a model each pipeline stage holds, and the parameters that are in it."""

from __future__ import annotations

from typing import NamedTuple

from hpcli.config.schema import ModelSection, ParallelismSection
from hpcli.models.description import describe_model, known
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_layout import layers_of_stage, stages_of_rank

_AFTER_LAYERS = ("norm", "head")


class StageLayers(NamedTuple):
    """What one pipeline stage holds: layers ``[start, stop)``; the first stage what comes before, the last what comes after."""

    start: int
    stop: int
    first: bool
    last: bool


class HeldStages(NamedTuple):
    """The stages of one pipeline rank, ascending: which they are, what they hold, and how many the whole model has."""

    indices: list[int]
    stages: list[StageLayers]
    total: int


def whole_model(model: ModelSection) -> StageLayers:
    """The one stage that holds everything."""
    return StageLayers(0, known(model.num_layers), True, True)


def held_stages(model: ModelSection, parallelism: ParallelismSection, mesh: ParallelMesh, pp_rank: int) -> HeldStages:
    """What the pipeline rank ``pp_rank`` holds; without a pipeline, the whole model."""
    if mesh.pp == 1:
        return HeldStages([0], [whole_model(model)], 1)
    interleave = parallelism.pipeline_parallel_interleave_num or 1
    total = mesh.pp * interleave
    indices = stages_of_rank(parallelism.pipeline_parallel_schedule, mesh.pp, interleave, pp_rank)
    stages = []
    for index in indices:
        layers = layers_of_stage(known(model.num_layers), total, index)
        stages.append(StageLayers(layers.start, layers.stop, index == 0, index == total - 1))
    return HeldStages(indices, stages, total)


def stage_shapes(model: ModelSection, stage: StageLayers) -> dict[str, tuple[int, ...]]:
    """Parameter name to shape, of one stage. Where embeddings are tied across stages, the last has a ``head.weight`` of its own."""
    shapes = {name: spec.shape for name, spec in describe_model(model).items()}
    held = {}
    for name, shape in shapes.items():
        module, _, rest = name.partition(".")
        if module == "layers":
            here = stage.start <= int(rest.partition(".")[0]) < stage.stop
        else:
            here = stage.last if module in _AFTER_LAYERS else stage.first
        if here:
            held[name] = shape
    if model.tie_embeddings and stage.last and not stage.first:
        held["head.weight"] = shapes["embedding.weight"]
    return held
