"""Schedules as data."""

from __future__ import annotations

import pytest

from hyper_parallel.core.pipeline_parallel import Kind, Step, make_schedule, validate
from hyper_parallel.core.pipeline_parallel.schedule import COMPUTES, with_communication


def computed(steps):
    """ "F0 B0 ...", with apostrophes for the rank's later stages."""
    stages = sorted({step.stage for step in steps})
    return " ".join(
        f"{step.kind.value}{step.micro_batch}{stages.index(step.stage) * chr(39)}" for step in steps if step.kind in COMPUTES
    )


def written(steps):
    return " ".join(step.kind.value if step.micro_batch < 0 else f"{step.kind.value}{step.micro_batch}" for step in steps)


def test_gpipe_does_all_forwards_before_the_first_backward():
    assert [computed(steps) for steps in make_schedule("gpipe", 2, 3).steps] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_holds_one_micro_batch_less_on_each_later_rank():
    assert [computed(steps) for steps in make_schedule("1f1b", 3, 4).steps] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_passes_a_round_of_micro_batches_through_each_stage_of_a_rank():
    """Figure 4 of Narayanan et al. (2021), for two ranks with two stages each."""
    assert [computed(steps) for steps in make_schedule("interleaved_1f1b", 2, 4, 2).steps] == [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ]


def test_transfers_follow_the_computations_and_the_reduction_the_last_backward():
    first, last = make_schedule("1f1b", 2, 2).steps
    assert written(first) == "F0 SA0 F1 SA1 RG0 B0 RG1 B1 R"
    assert written(last) == "RA0 F0 RA1 B0 SG0 F1 B1 SG1 R"


def test_a_stage_beside_its_neighbour_sends_nothing():
    (steps,) = make_schedule("interleaved_1f1b", 1, 2, 2).steps
    assert {step.kind for step in steps} == {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE_GRAD}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_every_schedule_that_is_made_can_be_run(name):
    made = 0
    for pp in range(1, 7):
        for micro_batches in range(1, 13):
            for interleave in (1, 2, 3) if name == "interleaved_1f1b" else (1,):
                try:
                    schedule = make_schedule(name, pp, micro_batches, interleave)
                except ValueError as refusal:
                    assert "micro-batch" in str(refusal)
                    continue
                validate(schedule)
                made += 1
    assert made >= 42


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("zbv", 2, 4), "unknown pipeline schedule 'zbv'; known: gpipe, 1f1b, interleaved_1f1b"),
        (("1f1b", 0, 4), "pp 0"),
        (("1f1b", 2, 4, 2), "one stage on each rank, not 2"),
        (("1f1b", 4, 3), "at least 4"),
        (("interleaved_1f1b", 4, 6, 2), None),
        (("interleaved_1f1b", 4, 9, 2), "8 or 12 would work"),
    ],
)
def test_what_a_schedule_cannot_lay_out_is_refused(arguments, words):
    if words is None:
        validate(make_schedule(*arguments))
        return
    with pytest.raises(ValueError, match=words):
        make_schedule(*arguments)


def test_orders_that_wait_for_one_another_are_refused():
    orders = [[Step(Kind.BACKWARD, 0, 0), Step(Kind.FORWARD, 0, 0)], [Step(Kind.FORWARD, 1, 0), Step(Kind.BACKWARD, 1, 0)]]
    with pytest.raises(ValueError, match="wait for one another: rank 0 at BACKWARD in stage 0 of micro-batch 0; rank 1 at FORWARD"):
        with_communication("mine", 1, ((0,), (1,)), orders)
