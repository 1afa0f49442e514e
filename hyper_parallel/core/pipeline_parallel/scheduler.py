"""Runs a schedule: one rank's steps over its stages, whatever the framework that they are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hyper_parallel.core.pipeline_parallel.schedule import Kind, PipelineSchedule, Step
from hyper_parallel.core.pipeline_parallel.validate import validate


class Stage(Protocol):
    """A stage of a pipeline on this rank. It keeps what its backward needs for each micro-batch until that has run."""

    def execute_forward(self, micro_batch: int, value: Any) -> Any:
        """Compute a micro-batch. ``value`` is the batch's own in the first stage, else the output of the stage before; the output
        of the last stage is the loss."""

    def execute_backward(self, micro_batch: int, gradient: Any) -> Any:
        """The gradient of the stage's input, of the gradient of its output (``None`` in the last stage); ``None`` in the first
        stage. Gradients of parameters are accumulated and not reduced yet."""

    def execute_reduce_grad(self) -> None:
        """Reduce the accumulated gradients over the ranks that share the stage."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Return when it is over: with what was received, or, for a send, when its buffer may be used again."""


class Transport(Protocol):
    """Moves values between the ranks of a pipeline without waiting. Two ranks exchange messages in the order of the schedule."""

    def send(self, value: Any, to_rank: int, step: Step) -> Pending:
        """Start sending to pipeline rank ``to_rank``; ``step`` tells what it is."""

    def receive(self, from_rank: int, step: Step) -> Pending:
        """Start receiving from pipeline rank ``from_rank``."""


class PipelineScheduler:
    """One rank's part of a schedule, ready to run any number of training steps.

    Args:
        schedule: as :func:`make_schedule` or anyone else made it; it is checked here.
        rank: this rank's place in the pipeline.
        stages: this rank's stages by their number.
        transport: to the other ranks of the pipeline; not used where there are none.

    Raises:
        ScheduleError: the schedule would deadlock or lose a step.
        ValueError: ``stages`` are not those that the schedule gives to ``rank``.
    """

    def __init__(
        self, schedule: PipelineSchedule, rank: int, stages: Mapping[int, Stage], transport: Transport | None = None
    ) -> None:
        validate(schedule)
        if sorted(stages) != sorted(schedule.stages[rank]):
            raise ValueError(f"rank {rank} was given the stages {sorted(stages)}, the schedule wants {list(schedule.stages[rank])}")
        self.schedule = schedule
        self.rank = rank
        self.stages = stages
        self.transport = transport
        self._last = schedule.stage_count - 1
        self._execute: dict[Kind, Callable[[Step], None]] = {
            Kind.FORWARD: self._exec_forward,
            Kind.BACKWARD: self._exec_backward,
            Kind.SEND_ACTIVATION: self._exec_send,
            Kind.SEND_GRADIENT: self._exec_send,
            Kind.RECV_ACTIVATION: self._exec_receive,
            Kind.RECV_GRADIENT: self._exec_receive,
            Kind.REDUCE_GRAD: self._exec_fsdp_reduce_grad,
        }
        self._inputs: Sequence[Any] = ()
        self._forget()

    def run(self, micro_batches: Sequence[Any]) -> list[Any]:
        """Take one training step: forward, backward and gradient reduction of all micro-batches.

        Args:
            micro_batches: the input of the first stage for each; on other ranks only their number matters.

        Returns:
            The losses in the order of the micro-batches on the rank of the last stage; elsewhere an empty list.

        Raises:
            ValueError: another number of micro-batches than the schedule's.
        """
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"the schedule takes {self.schedule.micro_batches} micro-batches, not {len(micro_batches)}")
        self._inputs = micro_batches
        try:
            for step in self.schedule.steps[self.rank]:
                self._exec_step(step)
            for sent in self._sending:
                sent.wait()
            return [self._losses[micro_batch] for micro_batch in sorted(self._losses)]
        finally:
            self._forget()

    def _exec_step(self, step: Step) -> None:
        self._execute[step.kind](step)

    def _exec_forward(self, step: Step) -> None:
        _, stage, micro_batch = step
        value = self._inputs[micro_batch] if stage == 0 else self._taken(Kind.FORWARD, stage, micro_batch)
        output = self.stages[stage].execute_forward(micro_batch, value)
        if stage == self._last:
            self._losses[micro_batch] = output
        else:
            self._hand_over(Kind.FORWARD, stage, stage + 1, micro_batch, output)

    def _exec_backward(self, step: Step) -> None:
        _, stage, micro_batch = step
        gradient = None if stage == self._last else self._taken(Kind.BACKWARD, stage, micro_batch)
        passed_on = self.stages[stage].execute_backward(micro_batch, gradient)
        if stage:
            self._hand_over(Kind.BACKWARD, stage, stage - 1, micro_batch, passed_on)

    def _exec_send(self, step: Step) -> None:
        kind, stage, micro_batch = step
        onward = kind is Kind.SEND_ACTIVATION
        value = self._leaving.pop((Kind.FORWARD if onward else Kind.BACKWARD, stage, micro_batch))
        peer = self.schedule.rank_of(stage + 1 if onward else stage - 1)
        self._sending.append(self._channel().send(value, peer, step))

    def _exec_receive(self, step: Step) -> None:
        kind, stage, micro_batch = step
        onward = kind is Kind.RECV_ACTIVATION
        peer = self.schedule.rank_of(stage - 1 if onward else stage + 1)
        self._arriving[Kind.FORWARD if onward else Kind.BACKWARD, stage, micro_batch] = self._channel().receive(peer, step)

    def _exec_fsdp_reduce_grad(self, step: Step) -> None:
        self.stages[step.stage].execute_reduce_grad()

    def _hand_over(self, kind: Kind, stage: int, neighbour: int, micro_batch: int, value: Any) -> None:
        """To the neighbouring stage: directly where it is on this rank, else left for the SEND that follows."""
        if neighbour in self.stages:
            self._local[kind, neighbour, micro_batch] = value
        else:
            self._leaving[kind, stage, micro_batch] = value

    def _taken(self, kind: Kind, stage: int, micro_batch: int) -> Any:
        key = (kind, stage, micro_batch)
        return self._local.pop(key) if key in self._local else self._arriving.pop(key).wait()

    def _channel(self) -> Transport:
        if self.transport is None:
            raise ValueError(f"the schedule has {self.schedule.ranks} ranks; PipelineScheduler needs a transport between them")
        return self.transport

    def _forget(self) -> None:
        """Drop what belongs to one training step, also after an error."""
        self._inputs = ()
        self._local: dict[tuple[Kind, int, int], Any] = {}
        self._leaving: dict[tuple[Kind, int, int], Any] = {}
        self._arriving: dict[tuple[Kind, int, int], Pending] = {}
        self._sending: list[Pending] = []
        self._losses: dict[int, Any] = {}
