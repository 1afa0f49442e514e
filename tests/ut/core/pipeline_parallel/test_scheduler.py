"""The scheduler runs schedules over stages; here the framework is plain numbers, and ranks are threads."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest

from hyper_parallel.core.pipeline_parallel import Kind, PipelineScheduler, ScheduleError, make_schedule


class Multiply:
    """Stage s multiplies by its weight; the last one's output is the loss."""

    def __init__(self, weight):
        self.weight = weight
        self.gradient = 0.0
        self.reduced = None
        self.saved = {}

    def execute_forward(self, micro_batch, value):
        self.saved[micro_batch] = value
        return self.weight * value

    def execute_backward(self, micro_batch, gradient):
        gradient = 1.0 if gradient is None else gradient
        self.gradient += gradient * self.saved.pop(micro_batch)
        return gradient * self.weight

    def execute_reduce_grad(self):
        self.reduced = self.gradient


class Wire:
    """First-in first-out channels between threads; a receiver checks that it gets what it waits for."""

    def __init__(self, rank, channels):
        self.rank, self.channels = rank, channels

    def send(self, value, to_rank, step):
        self.channels[self.rank, to_rank].put((step, value))
        return Done(None)

    def receive(self, from_rank, step):
        return Arriving(self.channels[from_rank, self.rank], step)


class Done:
    def __init__(self, value):
        self.value = value

    def wait(self):
        return self.value


class Arriving:
    def __init__(self, channel, step):
        self.channel, self.step = channel, step

    def wait(self):
        sent, value = self.channel.get(timeout=5)
        assert sent.micro_batch == self.step.micro_batch
        assert abs(sent.stage - self.step.stage) == 1
        return value


def run(schedule, weights, batches):
    channels = {(a, b): queue.Queue() for a in range(schedule.ranks) for b in range(schedule.ranks)}
    stages = [Multiply(weight) for weight in weights]
    losses, errors = {}, []

    def rank(index):
        try:
            mine = {stage: stages[stage] for stage in schedule.stages[index]}
            scheduler = PipelineScheduler(schedule, index, mine, Wire(index, channels))
            losses[index] = scheduler.run(batches)
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(schedule.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not errors, errors
    return stages, losses


@pytest.mark.parametrize(
    "name, pp, interleave", [("gpipe", 2, 1), ("1f1b", 1, 1), ("1f1b", 3, 1), ("interleaved_1f1b", 2, 2), ("interleaved_1f1b", 1, 3)]
)
def test_losses_and_gradients_are_those_of_the_product(name, pp, interleave):
    """Loss w0 * w1 * ... * x; the gradient of each weight is the product of the others times the sum of all x."""
    weights = [2.0, 3.0, 5.0, 7.0][: pp * interleave]
    batches = [1.0, 10.0, 100.0, 1000.0, 1.0, 1.0][: 3 * pp if name != "gpipe" else 3]
    stages, losses = run(make_schedule(name, pp, len(batches), interleave), weights, batches)
    product = 1.0
    for weight in weights:
        product *= weight
    assert losses[pp - 1] == [product * x for x in batches]
    assert all(losses[rank] == [] for rank in range(pp - 1))
    for stage, weight in zip(stages, weights, strict=True):
        assert stage.reduced == stage.gradient == product / weight * sum(batches)
        assert not stage.saved


def test_a_scheduler_can_run_again_after_an_error():
    class Broken(Multiply):
        fails = True

        def execute_backward(self, micro_batch, gradient):
            if self.fails:
                raise RuntimeError("broken")
            return super().execute_backward(micro_batch, gradient)

    stage = Broken(2.0)
    scheduler = PipelineScheduler(make_schedule("1f1b", 1, 2), 0, {0: stage})
    with pytest.raises(RuntimeError, match="broken"):
        scheduler.run([1.0, 2.0])
    stage.fails = False
    assert scheduler.run([1.0, 2.0]) == [2.0, 4.0]


def test_wrong_stages_numbers_and_schedules_are_refused():
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"given the stages \[0\], the schedule wants \[1\]"):
        PipelineScheduler(schedule, 1, {0: Multiply(1.0)})
    with pytest.raises(ScheduleError, match="missing"):
        PipelineScheduler(replace(schedule, steps=(schedule.steps[0][:-1], schedule.steps[1])), 0, {0: Multiply(1.0)})
    scheduler = PipelineScheduler(schedule, 0, {0: Multiply(1.0)})
    with pytest.raises(ValueError, match="takes 2 micro-batches, not 3"):
        scheduler.run([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="needs a transport"):
        scheduler.run([1.0, 2.0])


def test_the_gradient_reduction_goes_through_the_call_path_that_people_know():
    """Stack traces of the reported fault name these methods."""
    seen = []

    class Traced(PipelineScheduler):
        def _exec_step(self, step):
            seen.append(("_exec_step", step.kind))
            super()._exec_step(step)

        def _exec_fsdp_reduce_grad(self, step):
            seen.append(("_exec_fsdp_reduce_grad", step.kind))
            super()._exec_fsdp_reduce_grad(step)

    Traced(make_schedule("gpipe", 1, 1), 0, {0: Multiply(1.0)}).run([1.0])
    assert seen[-2:] == [("_exec_step", Kind.REDUCE_GRAD), ("_exec_fsdp_reduce_grad", Kind.REDUCE_GRAD)]
