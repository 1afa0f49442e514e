"""What the validator finds in schedules that are broken by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.pipeline_parallel import Kind, ScheduleError, Step, make_schedule, validate

GOOD = make_schedule("1f1b", 2, 2)


def changed(rank, change):
    steps = [list(s) for s in GOOD.steps]
    change(steps[rank])
    return replace(GOOD, steps=tuple(map(tuple, steps)))


def refused(schedule, words):
    with pytest.raises(ScheduleError, match=words):
        validate(schedule)


def test_a_good_schedule_passes():
    validate(GOOD)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_step_can_be_left_out(rank):
    for index in range(len(GOOD.steps[rank])):
        refused(changed(rank, lambda steps, i=index: steps.pop(i)), f"1 step is missing, first rank {rank}")


@pytest.mark.parametrize("rank", [0, 1])
def test_no_step_can_be_done_twice(rank):
    for index in range(len(GOOD.steps[rank])):
        refused(changed(rank, lambda steps, i=index: steps.append(steps[i])), "is done 2 times")


def test_steps_of_other_stages_and_micro_batches_are_found():
    refused(changed(0, lambda steps: steps.append(Step(Kind.FORWARD, 0, 2))), "micro-batch 2 belongs to no schedule")
    refused(changed(0, lambda steps: steps.append(Step(Kind.FORWARD, 1, 0))), "belongs to rank 1")
    refused(changed(0, lambda steps: steps.append(Step(Kind.SEND_GRADIENT, 0, 0))), "belongs to no schedule")


def test_stages_must_be_held_once():
    refused(replace(GOOD, stages=((0,), (0,))), r"hold the stages \[0, 0\]")
    refused(replace(GOOD, stages=((0,), (2,))), r"hold the stages \[0, 2\]")
    refused(replace(GOOD, steps=GOOD.steps[:1]), "2 ranks hold stages, but 1 have steps")


def swap(first, second):
    def change(steps):
        i, j = steps.index(first), steps.index(second)
        steps[i], steps[j] = steps[j], steps[i]

    return change


def test_what_is_used_must_be_there():
    backward, forward = Step(Kind.BACKWARD, 1, 0), Step(Kind.FORWARD, 1, 0)
    refused(changed(1, swap(forward, backward)), "BACKWARD in stage 1 of micro-batch 0 comes before FORWARD in stage 1")
    send = Step(Kind.SEND_GRADIENT, 1, 0)
    refused(changed(1, swap(backward, send)), "SEND_GRADIENT in stage 1 of micro-batch 0 comes before BACKWARD")
    receive = Step(Kind.RECV_ACTIVATION, 1, 0)
    refused(changed(1, swap(receive, forward)), "FORWARD in stage 1 of micro-batch 0 comes before RECV_ACTIVATION")
    reduce, last = Step(Kind.REDUCE_GRAD, 1), Step(Kind.BACKWARD, 1, 1)
    refused(changed(1, swap(reduce, last)), "REDUCE_GRAD in stage 1 comes before BACKWARD in stage 1 of micro-batch 1")


def test_messages_in_another_order_than_they_are_sent_in_deadlock():
    first, second = Step(Kind.RECV_ACTIVATION, 1, 0), Step(Kind.RECV_ACTIVATION, 1, 1)
    refused(
        changed(1, swap(first, second)),
        "deadlocks: rank 0 waits in SEND_ACTIVATION in stage 0 of micro-batch 0 for rank 1; "
        "rank 1 waits in RECV_ACTIVATION in stage 1 of micro-batch 1 for rank 0",
    )


def test_receiving_what_is_sent_later_deadlocks():
    def first(steps):
        steps.remove(Step(Kind.RECV_GRADIENT, 0, 0))
        steps.insert(0, Step(Kind.RECV_GRADIENT, 0, 0))

    refused(changed(0, first), "deadlocks: rank 0 waits in RECV_GRADIENT in stage 0 of micro-batch 0 for rank 1; rank 1 waits in")


def test_two_sends_that_wait_for_each_other_deadlock():
    """Rank 0 sends its second activation before it takes the gradient that rank 1 sends before it takes that activation."""

    def later(steps):
        steps.remove(Step(Kind.RECV_ACTIVATION, 1, 1))
        steps.insert(steps.index(Step(Kind.SEND_GRADIENT, 1, 0)) + 1, Step(Kind.RECV_ACTIVATION, 1, 1))

    refused(changed(1, later), "deadlocks: rank 0 waits in SEND_ACTIVATION .* rank 1 waits in SEND_GRADIENT")
