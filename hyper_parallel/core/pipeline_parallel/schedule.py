"""Pipeline schedules as data: what each rank does, step by step, during one training step.

A schedule is built in two parts. The *compute order* of each rank (its forwards and backwards) is what the papers describe. The
communication between them follows from it: an imagined run executes all ranks' computations as early as they can be, and notes
each transfer with its sender and its receiver in the same moment. All transfers therefore have one common order, of which each
rank's list is a part, so that neither sends that wait for their receiver nor channels that only know first-in first-out can
deadlock or be confused.

Sources: GPipe (Huang et al., 2019); 1F1B, PipeDream-Flush (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021);
interleaved 1F1B (Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021, section 2.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from hyper_parallel.core.pipeline_layout import check_micro_batches, stages_of_rank


class Kind(Enum):
    """What a step does.

    BACKWARD gives the gradients of inputs and weights. Where a BACKWARD_WEIGHT of the same stage and micro-batch follows, which
    zero-bubble schedules have, it gives those of inputs alone, and the weights' come then.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    REDUCE_GRAD = "R"


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
NO_MICRO_BATCH = -1


class Step(NamedTuple):
    """One step of one rank.

    Attributes:
        kind: an activation goes from ``stage`` to the next one (SEND) or comes to it from the one before (RECV); a gradient goes
            from ``stage`` to the one before, or comes to it from the next one.
        stage: the stage of this rank that the step is about.
        micro_batch: counted from 0; -1 for REDUCE_GRAD, which is about all of them.
    """

    kind: Kind
    stage: int
    micro_batch: int = NO_MICRO_BATCH

    def __str__(self) -> str:
        suffix = "" if self.micro_batch == NO_MICRO_BATCH else f" of micro-batch {self.micro_batch}"
        return f"{self.kind.name} in stage {self.stage}{suffix}"


@dataclass(frozen=True)
class PipelineSchedule:
    """What every rank does in one training step.

    Attributes:
        name: of the schedule, as in the configuration.
        micro_batches: how many the step has.
        stages: of each rank, ascending.
        steps: of each rank, in the order in which it takes them.
    """

    name: str
    micro_batches: int
    stages: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[Step, ...], ...]

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.stages)

    @property
    def stage_count(self) -> int:
        """Stages of all ranks together."""
        return sum(map(len, self.stages))

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """Stage and micro-batch of every backward whose weights come later."""
        weights = (step for steps in self.steps for step in steps if step.kind is Kind.BACKWARD_WEIGHT)
        return frozenset((step.stage, step.micro_batch) for step in weights)

    @cached_property
    def _owners(self) -> dict[int, int]:
        return {stage: rank for rank, held in enumerate(self.stages) for stage in held}

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds ``stage``.

        Raises:
            ValueError: none does.
        """
        if stage not in self._owners:
            raise ValueError(f"no rank of the schedule holds stage {stage}")
        return self._owners[stage]


Order = Callable[[int, int, int, int], list[Step]]


def make_schedule(name: str, pp: int, micro_batches: int, interleave: int = 1) -> PipelineSchedule:
    """The schedule ``name`` for ``pp`` ranks that hold ``interleave`` stages each.

    Args:
        name: "gpipe", "1f1b" or "interleaved_1f1b".

    Raises:
        ValueError: another name, fewer than one rank, stage or micro-batch, or numbers that the schedule cannot lay out.
    """
    if name not in _ORDERS:
        raise ValueError(f"unknown pipeline schedule {name!r}; known: {', '.join(_ORDERS)}")
    if min(pp, micro_batches, interleave) < 1:
        raise ValueError(f"pp {pp}, micro_batches {micro_batches} and interleave {interleave} must be at least 1")
    if name != "interleaved_1f1b" and interleave != 1:
        raise ValueError(f"{name} holds one stage on each rank, not {interleave}; interleaved_1f1b can hold more")
    problem = check_micro_batches(name, pp, interleave, micro_batches)
    if problem:
        raise ValueError(f"{problem.key}: {problem.message}")
    stages = tuple(tuple(stages_of_rank(name, pp, interleave, rank)) for rank in range(pp))
    orders = [_ORDERS[name](rank, pp, interleave, micro_batches) for rank in range(pp)]
    return with_communication(name, micro_batches, stages, orders)


def with_communication(
    name: str, micro_batches: int, stages: tuple[tuple[int, ...], ...], orders: Sequence[Sequence[Step]]
) -> PipelineSchedule:
    """A schedule from the compute order of each rank: transfers where a neighbouring stage is on another rank, and each stage's
    REDUCE_GRAD behind its last backward.

    Raises:
        ValueError: the orders wait for one another.
    """
    owner = {stage: rank for rank, held in enumerate(stages) for stage in held}
    last = len(owner) - 1
    left = Counter(step.stage for order in orders for step in order if step.kind is not Kind.FORWARD)
    lists: list[list[Step]] = [[] for _ in orders]
    at = [0] * len(orders)
    done: set[Step] = set()
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        ready = [
            (rank, order[position])
            for rank, (position, order) in enumerate(zip(at, orders, strict=True))
            if position < len(order) and all(needed in done for needed in inputs_of(order[position], last))
        ]
        if not ready:
            waiting = [f"rank {r} at {o[p]}" for r, (p, o) in enumerate(zip(at, orders, strict=True)) if p < len(o)]
            raise ValueError(f"the compute orders of {name} wait for one another: {'; '.join(waiting)}")
        for rank, step in ready:
            lists[rank].append(step)
            at[rank] += 1
        for rank, step in ready:  # after all computations of this moment, so that no receiver waits before it computes
            done.add(step)
            transfer = transfer_after(step, last)
            if transfer and owner[transfer[1].stage] != rank:
                lists[rank].append(transfer[0])
                lists[owner[transfer[1].stage]].append(transfer[1])
            left[step.stage] -= step.kind is not Kind.FORWARD
            if not left[step.stage] and step.kind is not Kind.FORWARD:
                lists[rank].append(Step(Kind.REDUCE_GRAD, step.stage))
    return PipelineSchedule(name, micro_batches, stages, tuple(map(tuple, lists)))


def inputs_of(step: Step, last_stage: int) -> tuple[Step, ...]:
    """The computations whose results FORWARD, BACKWARD or BACKWARD_WEIGHT needs."""
    kind, stage, micro_batch = step
    if kind is Kind.BACKWARD_WEIGHT:
        return (Step(Kind.BACKWARD, stage, micro_batch),)
    if kind is Kind.FORWARD:
        return (Step(Kind.FORWARD, stage - 1, micro_batch),) if stage else ()
    own = Step(Kind.FORWARD, stage, micro_batch)
    return (own,) if stage == last_stage else (own, Step(Kind.BACKWARD, stage + 1, micro_batch))


def transfer_after(step: Step, last_stage: int) -> tuple[Step, Step] | None:
    """The send and the receive that carry the result of FORWARD or BACKWARD to the neighbouring stage; None at the ends."""
    kind, stage, micro_batch = step
    if kind is Kind.FORWARD and stage < last_stage:
        return Step(Kind.SEND_ACTIVATION, stage, micro_batch), Step(Kind.RECV_ACTIVATION, stage + 1, micro_batch)
    if kind is Kind.BACKWARD and stage > 0:
        return Step(Kind.SEND_GRADIENT, stage, micro_batch), Step(Kind.RECV_GRADIENT, stage - 1, micro_batch)
    return None


def _gpipe(rank: int, pp: int, interleave: int, micro_batches: int) -> list[Step]:
    batches = range(micro_batches)
    return [Step(Kind.FORWARD, rank, m) for m in batches] + [Step(Kind.BACKWARD, rank, m) for m in batches]


def _one_forward_one_backward(rank: int, pp: int, interleave: int, micro_batches: int) -> list[Step]:
    warmup = min(micro_batches, pp - rank)
    forwards = [Step(Kind.FORWARD, rank, m) for m in range(micro_batches)]
    backwards = [Step(Kind.BACKWARD, rank, m) for m in range(micro_batches)]
    return _alternating(forwards, backwards, warmup)


def _interleaved(rank: int, pp: int, interleave: int, micro_batches: int) -> list[Step]:
    """Micro-batches go in rounds: a round passes through a rank's first stage, then through its second, and so on; backward in the
    opposite order of stages."""
    rounds = max(1, micro_batches // pp)
    size = micro_batches // rounds
    forwards, backwards = [], []
    for first in range(0, micro_batches, size):
        batches = range(first, first + size)
        for turn in range(interleave):
            forwards += [Step(Kind.FORWARD, rank + turn * pp, m) for m in batches]
        for turn in reversed(range(interleave)):
            backwards += [Step(Kind.BACKWARD, rank + turn * pp, m) for m in batches]
    warmup = min(len(forwards), (interleave - 1) * size + 2 * (pp - 1 - rank) + 1)
    return _alternating(forwards, backwards, warmup)


def _alternating(forwards: list[Step], backwards: list[Step], warmup: int) -> list[Step]:
    """``warmup`` forwards, then a backward and a forward in turn, then the backwards that are left."""
    order = forwards[:warmup]
    for backward, forward in zip(backwards, forwards[warmup:], strict=False):
        order += [backward, forward]
    return order + backwards[len(forwards) - warmup :]


_ORDERS: dict[str, Order] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
}
