"""Whether a schedule can be run: nothing is lost, nothing is done twice, and no ranks wait for one another for ever.

Checked in the strictest sense in use: a send waits until its receiver is there, and two ranks exchange messages in one order.
What passes here also runs where sends are buffered.
"""

from __future__ import annotations

from collections import Counter

from hyper_parallel.core.pipeline_parallel.schedule import (
    NO_MICRO_BATCH,
    RECEIVES,
    SENDS,
    Kind,
    PipelineSchedule,
    Step,
    transfer_after,
)


class ScheduleError(ValueError):
    """A schedule that would deadlock, lose a step or use what is not there yet."""


def validate(schedule: PipelineSchedule) -> None:
    """Check a schedule completely.

    Raises:
        ScheduleError: a stage on no rank or on two; a computation, transfer or reduction that is missing, doubled or on another
            rank than its stage; something used before it is there; a deadlock, with who waits for whom.
    """
    _check_stages(schedule)
    _check_steps(schedule)
    _check_run(schedule)


def _check_stages(schedule: PipelineSchedule) -> None:
    held = [stage for stages in schedule.stages for stage in stages]
    if sorted(held) != list(range(len(held))):
        raise ScheduleError(f"the ranks hold the stages {sorted(held)}; each of 0 ... n - 1 must be held once")
    if len(schedule.steps) != len(schedule.stages):
        raise ScheduleError(f"{len(schedule.stages)} ranks hold stages, but {len(schedule.steps)} have steps")


def _check_steps(schedule: PipelineSchedule) -> None:
    wanted: dict[Step, int] = {}
    last = schedule.stage_count - 1
    for rank, stages in enumerate(schedule.stages):
        for stage in stages:
            wanted[Step(Kind.REDUCE_GRAD, stage)] = rank
            for micro_batch in range(schedule.micro_batches):
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    step = Step(kind, stage, micro_batch)
                    wanted[step] = rank
                    transfer = transfer_after(step, last)
                    if transfer and schedule.rank_of(transfer[1].stage) != rank:
                        wanted[transfer[0]] = rank
                        wanted[transfer[1]] = schedule.rank_of(transfer[1].stage)
    for stage, micro_batch in schedule.split_backwards:
        if stage <= last and micro_batch in range(schedule.micro_batches):
            wanted[Step(Kind.BACKWARD_WEIGHT, stage, micro_batch)] = schedule.rank_of(stage)
    for rank, steps in enumerate(schedule.steps):
        for step, count in Counter(steps).items():
            if step not in wanted:
                raise ScheduleError(f"rank {rank}: {step} belongs to no schedule of these stages and micro-batches")
            if wanted[step] != rank:
                raise ScheduleError(f"rank {rank}: {step} belongs to rank {wanted[step]}")
            if count > 1:
                raise ScheduleError(f"rank {rank}: {step} is done {count} times")
    done = {step for steps in schedule.steps for step in steps}
    missing = [f"rank {rank}: {step}" for step, rank in wanted.items() if step not in done]
    if missing:
        raise ScheduleError(f"{len(missing)} step{'s are' if len(missing) > 1 else ' is'} missing, first {missing[0]}")


def _check_run(schedule: PipelineSchedule) -> None:
    """Run the schedule with sends that wait for their receiver, and stop where nothing moves."""
    at = [0] * schedule.ranks
    here: set[Step] = set()  # what is computed, and what has arrived
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.steps):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                if step.kind in RECEIVES:
                    break  # its sender moves both
                _check_there(schedule, rank, step, here)
                if step.kind in SENDS:
                    peer = _peer(schedule, step)
                    theirs = schedule.steps[peer]
                    if at[peer] >= len(theirs) or theirs[at[peer]] != _received_as(step):
                        break
                    here.add(_received_as(step))
                    at[peer] += 1
                here.add(step)
                at[rank] += 1
                moved = True
    stuck = [(rank, steps[at[rank]]) for rank, steps in enumerate(schedule.steps) if at[rank] < len(steps)]
    if stuck:
        who = "; ".join(
            f"rank {rank} waits in {step}" + (f" for rank {_peer(schedule, step)}" if step.kind in SENDS + RECEIVES else "")
            for rank, step in stuck
        )
        raise ScheduleError(f"the schedule deadlocks: {who}")


def _check_there(schedule: PipelineSchedule, rank: int, step: Step, here: set[Step]) -> None:
    """That what ``step`` uses is on this rank, in its list's own order."""
    for needed in _needs(schedule, step):
        if needed not in here:
            raise ScheduleError(f"rank {rank}: {step} comes before {needed}, which it needs")


def _needs(schedule: PipelineSchedule, step: Step) -> list[Step]:
    kind, stage, micro_batch = step
    if kind is Kind.REDUCE_GRAD:
        split = schedule.split_backwards
        last = (Kind.BACKWARD_WEIGHT if (stage, m) in split else Kind.BACKWARD for m in range(schedule.micro_batches))
        return [Step(kind, stage, m) for m, kind in enumerate(last)]
    if kind is Kind.BACKWARD_WEIGHT:
        return [Step(Kind.BACKWARD, stage, micro_batch)]
    if kind is Kind.SEND_ACTIVATION:
        return [Step(Kind.FORWARD, stage, micro_batch)]
    if kind is Kind.SEND_GRADIENT:
        return [Step(Kind.BACKWARD, stage, micro_batch)]
    forward = kind is Kind.FORWARD
    neighbour = stage - 1 if forward else stage + 1
    needed = [] if forward else [Step(Kind.FORWARD, stage, micro_batch)]
    if 0 <= neighbour < schedule.stage_count:
        local = schedule.rank_of(neighbour) == schedule.rank_of(stage)
        arrival = Kind.RECV_ACTIVATION if forward else Kind.RECV_GRADIENT
        needed.append(Step(kind, neighbour, micro_batch) if local else Step(arrival, stage, micro_batch))
    return needed


def _received_as(send: Step) -> Step:
    assert send.kind in SENDS and send.micro_batch != NO_MICRO_BATCH
    if send.kind is Kind.SEND_ACTIVATION:
        return Step(Kind.RECV_ACTIVATION, send.stage + 1, send.micro_batch)
    return Step(Kind.RECV_GRADIENT, send.stage - 1, send.micro_batch)


def _peer(schedule: PipelineSchedule, step: Step) -> int:
    """The rank at the other end of a transfer."""
    onward = step.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)
    return schedule.rank_of(step.stage + 1 if onward else step.stage - 1)
