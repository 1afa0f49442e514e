"""The order in which torch's pipeline runtime takes its steps, without a process group or a stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hyper_parallel.core.pipeline_layout import stages_of_rank
from hyper_parallel.core.pipeline_parallel.schedule import (
    Kind,
    PipelineSchedule,
    Step,
    make_schedule,
    with_communication,
)
from hyper_parallel.platform.torch.pipeline import SCHEDULES

_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.BACKWARD,
    "BACKWARD_WEIGHT": Kind.BACKWARD_WEIGHT,
}


def runtime_actions(name: str, pp: int, interleave: int, micro_batches: int) -> list[list[tuple[str, int]]] | None:
    """What torch's runtime does on each rank, as (name of the action, stage), its gathering (UNSHARD) and freeing (RESHARD) of a
    stage's parameters among it; None for the schedules of one stage on a rank, which leave both to FSDP2."""
    orders = _orders(name, pp, interleave, micro_batches)
    if orders is None:
        return None
    return [[(action.computation_type.name, action.stage_index) for action in order] for order in orders]


def torch_schedule(name: str, pp: int, interleave: int, micro_batches: int) -> PipelineSchedule:
    """The computations in torch's order, as data that can be checked, simulated and drawn. What torch overlaps (DualPipeV's forward
    of one micro-batch with the backward of another) comes one after the other.

    The schedules of one stage on a rank are the ones of the core: torch 2.13 runs them in loops that say the same, and what it
    keeps as ``pipeline_order`` beside them is wrong for 1F1B's last rank (it leaves out micro-batch 0).
    """
    orders = _orders(name, pp, interleave, micro_batches)
    if orders is None:
        return make_schedule(name, pp, micro_batches)
    stages = tuple(tuple(stages_of_rank(name, pp, interleave, rank)) for rank in range(pp))
    steps = [
        [
            Step(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in order
            if action.computation_type.name in _KINDS
        ]
        for order in orders
    ]
    return with_communication(name, micro_batches, stages, steps)


def _orders(name: str, pp: int, interleave: int, micro_batches: int) -> list[list[Any]] | None:
    kind = SCHEDULES[name]
    if issubclass(kind, PipelineScheduleSingle):
        return None
    stages = [
        SimpleNamespace(num_stages=pp * interleave, group_size=pp, group_rank=0, stage_index=index, is_first=not index, submod=None)
        for index in stages_of_rank(name, pp, interleave, 0)
    ]
    schedule = kind(stages, micro_batches, loss_fn=lambda output, target: output)
    orders = schedule.pipeline_order_with_comms
    return [[step for action in orders[rank] for step in action.sub_actions or (action,)] for rank in range(pp)]
