"""Which pipeline rank holds which stages and layers, and how many micro-batches a schedule takes.

A pipeline of ``pp`` ranks with ``interleave`` stages on each has ``pp * interleave`` stages. They go around the ranks in a loop
(rank r holds r, r + pp, ...), or down and up again in a V (rank r holds r and 2 * pp - 1 - r), as the schedule wants.
"""

from __future__ import annotations

from hyper_parallel.core.mesh import LayoutProblem

V_SCHEDULES = frozenset({"zbv", "dualpipev"})
ZERO_BUBBLE_SCHEDULES = frozenset({"interleaved_zero_bubble", "zbv", "dualpipev"})


def stages_of_rank(schedule: str, pp: int, interleave: int, pp_rank: int) -> list[int]:
    """The stages that ``pp_rank`` holds, ascending."""
    if schedule in V_SCHEDULES:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + turn * pp for turn in range(interleave)]


def layers_of_stage(layers: int, stages: int, stage: int) -> range:
    """The layers of one stage; every stage has as many, which :func:`check_transformer` demands."""
    each = layers // stages
    return range(stage * each, (stage + 1) * each)


def check_micro_batches(schedule: str, pp: int, interleave: int, micro_batches: int) -> LayoutProblem | None:
    """Whether ``schedule`` can be laid out for that many micro-batches in a step."""
    stages = pp * interleave
    key = "training.micro_batch_size"
    least = {"1f1b": pp, "dualpipev": stages}.get(schedule, 1)
    if micro_batches < least:
        return LayoutProblem(
            key,
            None,
            f"makes {micro_batches} micro-batch{'es' * (micro_batches != 1)} a step, and {schedule} over {pp} pipeline ranks needs "
            f"at least {least}; make it smaller, or training.global_batch_size larger",
        )
    rounds = max(1, micro_batches // pp)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and micro_batches % rounds:
        lower = micro_batches // pp * pp
        return LayoutProblem(
            key,
            None,
            f"makes {micro_batches} micro-batches a step, and {schedule} runs them in {rounds} rounds of equal size; "
            f"{lower} or {lower + pp} would work",
        )
    return None
