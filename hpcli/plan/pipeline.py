"""The schedule of a pipeline, from what runs it: how long ranks are idle, what they hold, when parameters are gathered."""

from __future__ import annotations

from typing import NamedTuple

from hpcli.config.schema import Config
from hpcli.plan.memory import micro_batches, reshards_after_forward
from hpcli.plan.shards import HeldStage
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_parallel import Kind, PipelineSchedule, make_schedule


class Pipeline(NamedTuple):
    """A schedule, and where torch's runtime gathers and frees a stage's parameters by itself, what it does on each rank."""

    schedule: PipelineSchedule
    actions: list[list[tuple[str, int]]] | None


def pipeline_of(config: Config, mesh: ParallelMesh) -> Pipeline | None:
    """The schedule that runs on the platform of ``config``; None without a pipeline."""
    if mesh.pp == 1:
        return None
    name = config.parallelism.pipeline_parallel_schedule
    sizes = mesh.pp, config.parallelism.pipeline_parallel_interleave_num or 1, micro_batches(config, mesh)
    if config.platform == "mindspore":
        return Pipeline(make_schedule(name, sizes[0], sizes[2], sizes[1]), None)
    from hyper_parallel.platform.torch.pipeline_order import runtime_actions, torch_schedule

    return Pipeline(torch_schedule(name, *sizes), runtime_actions(name, *sizes))


def gathers(config: Config, mesh: ParallelMesh, pipeline: Pipeline | None, stage: HeldStage, pp_rank: int) -> list[int]:
    """How often each unit of ``stage`` is gathered in a step."""
    if pipeline is None or config.platform == "mindspore":  # freed after every backward
        return [micro_batches(config, mesh) * (1 + reshards_after_forward(config, unit)) for unit in stage.units]
    kinds = {Kind.FORWARD: "FORWARD", Kind.BACKWARD: "FULL_BACKWARD", Kind.BACKWARD_WEIGHT: "BACKWARD_WEIGHT"}
    if pipeline.actions is not None:
        actions = pipeline.actions[pp_rank]
    else:
        actions = [(kinds.get(step.kind, ""), step.stage) for step in pipeline.schedule.steps[pp_rank]]
    mine = [name for name, number in actions if number == stage.number]
    return [_gathers(mine, reshards_after_forward(config, unit)) for unit in stage.units]


def _gathers(actions: list[str], reshards: bool) -> int:
    """A unit is gathered where it is needed or asked for and not there. A pipeline does not free it after backward."""
    there, count = False, 0
    for action in actions:
        if action in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "UNSHARD"):
            count += not there
            there = True
        if action == "RESHARD" or (action == "FORWARD" and reshards):
            there = False
    return count
