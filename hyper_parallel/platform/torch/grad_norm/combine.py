"""From this rank's gradients to the global norm: one all-gather of one small record per rank.

Every rank combines the gathered records in the same order with the same arithmetic, so all hold the same bits, and
every decision (a list that differs, gradients missing on some ranks, a non-finite norm) is taken by all alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hyper_parallel.core.norm import combine, identity
from hyper_parallel.core.norm_exchange import Conclusion, RankRecord, conclude, fingerprint, with_more
from hyper_parallel.platform.torch.grad_norm.arrangement import Arrangement
from hyper_parallel.platform.torch.grad_norm.local import norm_of_many
from hyper_parallel.platform.torch.grad_norm.partial import added_up, whole_everywhere
from hyper_parallel.platform.torch.grad_norm.plan import Found, GradientPlan
from hyper_parallel.platform.torch.grad_norm.scope import Scope, describe
from hyper_parallel.platform.torch.shared import UnfinishedGradientsError

_NAMES_SHOWN = 5


class GradientMismatchError(RuntimeError):
    """The ranks do not hold the same list of parameters, so no norm of the whole model exists."""


class NonFiniteNormError(RuntimeError):
    """The norm is NaN or infinite and ``error_if_nonfinite`` was set. Raised on every rank alike."""


class Measured(NamedTuple):
    """One measurement: this step's gradients, every rank's record in rank order, and what follows from them. ``counts`` says
    whether this rank counted its piece of a parameter."""

    found: Found
    ranks: tuple[int, ...]
    records: tuple[RankRecord, ...]
    conclusion: Conclusion
    counts: Callable[[int], bool]


def measure(plan: GradientPlan, found: Found, tensors: Sequence[torch.Tensor], p: float) -> Measured:
    """The global norm of this step's gradients, ``found`` by ``plan`` for the list ``tensors``.

    One collective; three where some parameter has a gradient on one rank and none on a peer. Gradients that are still to be
    summed over ranks cost one more, and a third where what comes out is sharded.

    Raises:
        GradientMismatchError: the ranks' lists of parameters differ; on every rank, naming the first difference.
        ValueError, TypeError: some rank has a gradient that cannot be measured; on every rank.
        UnfinishedGradientsError: some rank has only a part of a gradient; on every rank.
    """
    arrangement = found.arrangement
    records = _exchange(plan, found, arrangement, p)
    conclusion = conclude(records, p)
    if conclusion.errors:
        raise _error(plan, found)
    if conclusion.list_differs:
        raise GradientMismatchError(_difference(plan, tensors, conclusion.list_differs))
    if conclusion.partial_differs:
        raise GradientMismatchError(_partial_difference(plan, found))
    counts: Callable[[int], bool] = plan.counts
    if conclusion.gradients_missing:
        counts = _lowest_holders(plan, found.present)
        arrangement = plan.arrange(found.tensors, found.locals_, found.present, counts)
        records = _exchange(plan, found, arrangement, p)
        conclusion = conclude(records, p)
    if conclusion.partial:
        records, conclusion = _with_partial(plan, found, arrangement, p, records, conclusion, counts)
    return Measured(found, plan.scope.ranks, records, conclusion, counts)


def _with_partial(
    plan: GradientPlan,
    found: Found,
    arrangement: Arrangement,
    p: float,
    records: tuple[RankRecord, ...],
    conclusion: Conclusion,
    counts: Callable[[int], bool],
) -> tuple[tuple[RankRecord, ...], Conclusion]:
    """The norm with the gradients that are still to be summed over ranks."""
    gradients: list[Any] = [found.tensors[index] for index in arrangement.partial]
    values = added_up(gradients) if gradients else []
    alone = len({record.partial for record in records}) == 1
    if alone and whole_everywhere(gradients, plan.scope.ranks):  # every rank knows them all, in the same bits
        return records, with_more(conclusion, records, norm_of_many(values, p), p)
    here = [v for v, index in zip(values, _partial_indices(found, arrangement), strict=True) if counts(index)]
    more = norm_of_many(here, p) if here else identity(p)
    record = next(r for rank, r in zip(plan.scope.ranks, records, strict=True) if rank == _this_rank())
    elements = record.elements + sum(value.numel() for value in here)
    record = record._replace(contributed=combine([record.contributed, more], p), elements=elements)
    records = _gather_records(plan.scope, record)
    return records, conclude(records, p)


def _partial_indices(found: Found, arrangement: Arrangement) -> list[int]:
    """Which of the plan's parameters have a gradient that is still to be summed."""
    indices = [index for index, there in enumerate(found.present) if there]
    return [indices[position] for position in arrangement.partial]


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def require_finite(measured: Measured, plan: GradientPlan, p: float, names: Sequence[str] | None) -> None:
    """Raise on every rank alike where the global norm is NaN or infinite.

    Raises:
        NonFiniteNormError: naming the ranks and their parameters with non-finite gradients.
    """
    if math.isfinite(measured.conclusion.norm):
        return
    found = measured.found
    indices = [index for index, there in enumerate(found.present) if there]
    mine = [
        plan.name(index, names)
        for index, tensor in zip(indices, found.locals_, strict=True)
        if tensor.numel() and not math.isfinite(norm_of_many([tensor], math.inf))
    ]
    by_rank = dict(zip(measured.ranks, gather_objects(plan.scope, mine), strict=True))
    where = "; ".join(f"rank {rank}: {_shortened(found_names)}" for rank, found_names in by_rank.items() if found_names)
    raise NonFiniteNormError(
        f"the gradient norm of order {p:g} is {measured.conclusion.norm}; gradients that are not finite: "
        f"{where or 'none alone, the norm itself overflows'}. Nothing was clipped."
    )


def _exchange(plan: GradientPlan, found: Found, arrangement: Arrangement, p: float) -> tuple[RankRecord, ...]:
    local = arrangement.measure(found.locals_, p)
    record = RankRecord(
        contributed=local.contributed,
        held=local.held,
        with_gradient=len(found.tensors),
        without_gradient=len(found.present) - len(found.tensors),
        elements=local.elements,
        parameters=plan.list_fingerprint,
        peers=plan.peers_fingerprint,
        present=plan.present_fingerprint(found.present),
        replicas=0 if arrangement.partial or found.error else plan.replicas_fingerprint,
        float64=arrangement.float64,
        partial=fingerprint(repr(_partial_indices(found, arrangement))) if arrangement.partial else 0,
        error=found.error is not None,
    )
    return _gather_records(plan.scope, record)


def _gather_records(scope: Scope, record: RankRecord) -> tuple[RankRecord, ...]:
    if scope.group is None:
        return (record,)
    # float64 travels as its bits, which every device can hold and gather
    mine = torch.from_numpy(np.array(record, np.float64).view(np.int32)).to(scope.device)
    everyone = torch.empty(len(scope.ranks) * len(mine), dtype=mine.dtype, device=scope.device)
    dist.all_gather_single(everyone, mine, group=scope.group)
    rows = everyone.cpu().numpy().view(np.float64).reshape(len(scope.ranks), -1)
    return tuple(RankRecord(*row) for row in rows.tolist())


def gather_objects(scope: Scope, mine: Any) -> list[Any]:
    """``mine`` of every rank of the scope, in rank order."""
    if scope.group is None:
        return [mine]
    everyone: list[Any] = [None] * len(scope.ranks)
    dist.all_gather_object(everyone, mine, group=scope.group)
    return everyone


def _lowest_holders(plan: GradientPlan, present: bytes) -> Callable[[int], bool]:
    """Of the replicas of each piece, the lowest rank whose parameter has a gradient counts it."""
    gathered = gather_objects(plan.scope, (plan.peers, present))
    present_on = {
        rank: bitmap
        for rank, (peers, bitmap) in zip(plan.scope.ranks, gathered, strict=True)
        if peers == plan.peers and len(bitmap) == len(present)
    }
    this_rank = dist.get_rank()

    def counts(index: int) -> bool:
        holding = plan.holdings[index]
        holders = [rank for rank in holding.replicas if rank in present_on and present_on[rank][index]]
        return holding.leads and (not holders or holders[0] == this_rank)

    return counts


def _difference(plan: GradientPlan, tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> str:
    mine = [describe(tensor) for tensor in plan.chosen(tensors)]
    lists = gather_objects(plan.scope, mine)
    odd = positions[0]
    usual = next(i for i, entries in enumerate(lists) if i not in positions and entries)
    pairs = zip(lists[usual], lists[odd], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(lists[usual]), len(lists[odd])))
    ranks = plan.scope.ranks
    listed = ", ".join(str(ranks[i]) for i in positions)
    return (
        f"rank{'s' * (len(positions) > 1)} {listed} list{'s' * (len(positions) == 1)} other parameters than the others. "
        f"First difference at index {at}: rank {ranks[usual]} has {_entry(lists[usual], at)}, "
        f"rank {ranks[odd]} has {_entry(lists[odd], at)}. "
        "Pass the same parameters in the same order on every rank, those without a gradient too; "
        'stages of a pipeline hold different ones where mesh= has an axis "pp".'
    )


def _error(plan: GradientPlan, found: Found) -> Exception:
    """What every rank raises where some cannot measure their gradients."""
    everyone = gather_objects(plan.scope, None if found.error is None else (type(found.error).__name__, str(found.error)))
    named = [(rank, *error) for rank, error in zip(plan.scope.ranks, everyone, strict=True) if error is not None]
    raised = {name for _, name, _ in named}
    kind = next((kind for kind in (UnfinishedGradientsError, TypeError) if kind.__name__ in raised), ValueError)
    if len({text for _, _, text in named}) == 1 and len(named) == len(everyone):
        return kind(named[0][2])
    return kind("; ".join(f"rank {rank}: {text}" for rank, _, text in named))


def _partial_difference(plan: GradientPlan, found: Found) -> str:
    mine = _partial_indices(found, found.arrangement)
    lists = dict(zip(plan.scope.ranks, gather_objects(plan.scope, mine), strict=True))
    shown = "; ".join(f"rank {rank}: {entries or 'none'}" for rank, entries in lists.items())
    return (
        f"the ranks do not agree on which gradients are still to be summed over ranks (Partial): {shown}. "
        "Give a parameter that was not used on a rank a gradient of zeros there."
    )


def _entry(entries: list[str], index: int) -> str:
    return entries[index] if index < len(entries) else f"nothing (its list ends after {len(entries)})"


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
