"""How long a schedule takes, how much of it the ranks are idle, and how many micro-batches they hold, without running it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hyper_parallel.core.pipeline_parallel.schedule import (
    COMPUTES,
    RECEIVES,
    SENDS,
    Kind,
    PipelineSchedule,
    Step,
    inputs_of,
)
from hyper_parallel.core.pipeline_parallel.validate import validate


class Durations(NamedTuple):
    """How long the steps of one stage and one micro-batch take, in any one unit of time.

    Attributes:
        forward, backward: a computation; backward takes about twice as long as forward. A backward that is split takes half of
            it for the inputs' gradients, and half for the weights'.
        transfer: from the end of a computation to the arrival of its result on another rank.
        reduce: the reduction of a stage's gradients over the data-parallel ranks.
    """

    forward: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0
    reduce: float = 0.0

    def of(self, kind: Kind, split: bool = False) -> float:
        """The time for which a step occupies its rank: transfers go on beside the computation."""
        backward = self.backward / 2 if split else self.backward
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: backward,
            Kind.BACKWARD_WEIGHT: backward,
            Kind.REDUCE_GRAD: self.reduce,
        }.get(kind, 0.0)


class Span(NamedTuple):
    """A step with the times at which it starts and ends."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated training step.

    Attributes:
        spans: of each rank: its computations and reductions, in order.
        peak_in_flight: of each rank: the largest number of micro-batches, counted per stage, whose forward is done and whose
            backward is not, that is of sets of activations that it holds.
    """

    spans: tuple[tuple[Span, ...], ...]
    peak_in_flight: tuple[int, ...]

    @property
    def total(self) -> float:
        """From the start to the end of the last step of any rank."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble_share(self) -> float:
        """The share of the ranks' time in which they neither compute nor reduce, between 0 and 1."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        available = self.total * len(self.spans)
        return 1.0 - busy / available if available else 0.0


def simulate(schedule: PipelineSchedule, durations: Durations | Sequence[Durations] | None = None) -> Timeline:
    """Run ``schedule`` in imagination. Sends are buffered, and a rank waits only for what its next computation needs.

    Args:
        durations: for all stages, or one for each stage; by default forward 1, backward 2.

    Raises:
        ScheduleError: the schedule cannot be run.
        ValueError: not as many durations as stages.
    """
    validate(schedule)
    by_stage = _by_stage(schedule, durations)
    last = schedule.stage_count - 1
    ends: dict[Step, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.steps]
    remaining = [deque(s for s in steps if s.kind not in SENDS + RECEIVES) for steps in schedule.steps]
    clock = [0.0] * schedule.ranks
    while any(remaining):
        for rank, steps in enumerate(remaining):
            while steps:
                step = steps[0]
                needed = inputs_of(step, last) if step.kind in COMPUTES else ()
                if not all(n in ends for n in needed):
                    break
                arrivals = [_arrival(schedule, rank, n, ends[n], by_stage) for n in needed]
                start = max([clock[rank], *arrivals])
                split = (step.stage, step.micro_batch) in schedule.split_backwards
                clock[rank] = ends[step] = start + by_stage[step.stage].of(step.kind, split)
                spans[rank].append(Span(step, start, clock[rank]))
                steps.popleft()
    peaks = tuple(peak_in_flight(schedule, rank) for rank in range(schedule.ranks))
    return Timeline(tuple(map(tuple, spans)), peaks)


def _by_stage(schedule: PipelineSchedule, durations: Durations | Sequence[Durations] | None) -> list[Durations]:
    if durations is None or isinstance(durations, Durations):
        return [durations or Durations()] * schedule.stage_count
    if len(durations) != schedule.stage_count:
        raise ValueError(f"{len(durations)} durations were given for {schedule.stage_count} stages")
    return list(durations)


def _arrival(
    schedule: PipelineSchedule, rank: int, needed: Step, end: float, by_stage: Sequence[Durations]
) -> float:
    elsewhere = schedule.rank_of(needed.stage) != rank
    return end + by_stage[needed.stage].transfer * elsewhere


def peak_in_flight(schedule: PipelineSchedule, rank: int, weigh: Callable[[int], int] = lambda stage: 1) -> int:
    """The most that ``rank`` holds of activations at once: ``weigh`` tells what one micro-batch of a stage is, by default 1.

    They are held from forward to backward, that is the last part of it where it is split.
    """
    held = peak = 0
    for kind, stage, micro_batch in schedule.steps[rank]:
        if kind is Kind.FORWARD:
            held += weigh(stage)
            peak = max(peak, held)
        elif kind is Kind.BACKWARD_WEIGHT or (
            kind is Kind.BACKWARD and (stage, micro_batch) not in schedule.split_backwards
        ):
            held -= weigh(stage)
    return peak


def draw(timeline: Timeline, width: int = 100) -> str:
    """The timeline as text: a line for each rank, at most ``width`` columns wide; what is longer goes on in a block below.

    Forward of micro-batch 3 is ``3>``, backward ``3<``, drawn out over the time that they take, a backward for weights alone ``3w``,
    the reduction ``=``, idle time ``.``; a rank with several stages marks later ones with as many apostrophes (``3'>``). "holds" is the largest number of
    micro-batches that the rank holds activations of.
    """
    if not timeline.total:
        return ""
    ranks, held = len(str(len(timeline.spans) - 1)), len(str(max(timeline.peak_in_flight)))
    heads = [f"rank {rank:<{ranks}}  holds {peak:>{held}} |" for rank, peak in enumerate(timeline.peak_in_flight)]
    cells = max(1, width - len(heads[0]) - 1)
    scale = _scale(timeline)
    lines = [_line(spans, scale, timeline.total) for spans in timeline.spans]
    blocks = [
        "\n".join(f"{head}{line[first : first + cells]}|" for head, line in zip(heads, lines, strict=True))
        for first in range(0, len(lines[0]), cells)
    ]
    idle = f"idle {100 * timeline.bubble_share:.1f} % of the ranks' time"
    split = any(span.step.kind is Kind.BACKWARD_WEIGHT for spans in timeline.spans for span in spans)
    late = ", w weights" * split
    return "\n\n".join(blocks) + f"\n{idle}; > forward, < backward{late}, = gradient reduction, . idle"


def _scale(timeline: Timeline) -> float:
    """Columns per unit of time: as many as the label of the shortest computation needs."""
    return max(
        len(_label(span.step, spans)) / (span.end - span.start)
        for spans in timeline.spans
        for span in spans
        if span.end > span.start
    )


def _line(spans: Sequence[Span], scale: float, total: float) -> str:
    line = ["."] * max(1, round(total * scale))
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        text = _label(span.step, spans)
        line[start:end] = list((text + text[-1] * (end - start))[: end - start])
    return "".join(line)


_SIGNS = {Kind.FORWARD: ">", Kind.BACKWARD: "<", Kind.BACKWARD_WEIGHT: "w"}


def _label(step: Step, spans: Sequence[Span]) -> str:
    if step.kind is Kind.REDUCE_GRAD:
        return "="
    turn = sorted({span.step.stage for span in spans}).index(step.stage)
    return f"{step.micro_batch}{turn * chr(39)}{_SIGNS[step.kind]}"
