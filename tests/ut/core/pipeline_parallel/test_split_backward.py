"""Backwards in two parts: the gradients of inputs, and later those of weights."""

from __future__ import annotations

import pytest

from hyper_parallel.core.pipeline_parallel import Kind, ScheduleError, Step, draw, simulate, validate
from hyper_parallel.core.pipeline_parallel.schedule import PipelineSchedule, with_communication
from hyper_parallel.core.pipeline_parallel.simulate import peak_in_flight

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT


def schedule(*orders: list[tuple[Kind, int, int]]) -> PipelineSchedule:
    steps = [[Step(*step) for step in order] for order in orders]
    return with_communication("split", 2, tuple((rank,) for rank in range(len(orders))), steps)


LAST_WAITS = schedule(
    [(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)],
    [(F, 1, 0), (B, 1, 0), (F, 1, 1), (B, 1, 1), (W, 1, 0), (W, 1, 1)],
)


def test_weights_wait_and_the_reduction_waits_for_them():
    validate(LAST_WAITS)
    kinds = [step.kind for step in LAST_WAITS.steps[1] if step.kind in (F, B, W, Kind.REDUCE_GRAD)]
    assert kinds == [F, B, F, B, W, W, Kind.REDUCE_GRAD]


def test_each_part_takes_half_of_a_backward_and_the_stage_before_waits_for_the_first_alone():
    timeline = simulate(LAST_WAITS)
    assert [(span.start, span.end) for span in timeline.spans[1][:4]] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert [(span.start, span.end) for span in timeline.spans[0][2:4]] == [(3, 5), (5, 7)]
    assert "0w" in draw(timeline)


def test_activations_are_held_until_the_weights_are_done():
    assert [peak_in_flight(LAST_WAITS, rank) for rank in (0, 1)] == [2, 2]
    assert peak_in_flight(LAST_WAITS, 1, lambda stage: 100) == 200


def test_weights_before_their_inputs_are_refused():
    wrong = schedule([(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1), (W, 0, 0)])
    steps = list(wrong.steps[0])
    weights = next(step for step in steps if step.kind is W)
    steps.remove(weights)
    swapped = PipelineSchedule(wrong.name, 2, wrong.stages, ((weights, *steps),))
    with pytest.raises(ScheduleError, match="BACKWARD_WEIGHT"):
        validate(swapped)
