"""The global norm of gradients on MindSpore: what this rank holds, one all-gather of a record, and one conclusion on all ranks.

What a norm is, what ranks tell one another and what follows from it is shared with torch (``core.norm``, ``core.norm_exchange``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.norm import combine
from hyper_parallel.core.norm_exchange import Conclusion, RankRecord, conclude, fingerprint
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.collectives import Group
from hyper_parallel.platform.mindspore.finish_gradients import (
    UnfinishedGradientsError,
    is_finished,
    shared_groups,
)
from hyper_parallel.platform.mindspore.layout import gradient_of, place
from hyper_parallel.platform.mindspore.mesh import group, whole_group
from hyper_parallel.platform.mindspore.tensors import on_host, writable

_NAMES_SHOWN = 5
_FLOATING = (ms.float64, ms.float32, ms.bfloat16, ms.float16)


class GradientMismatchError(RuntimeError):
    """The ranks do not hold the same list of parameters, so no norm of the whole model exists."""


class NonFiniteNormError(RuntimeError):
    """The norm is NaN or infinite and ``error_if_nonfinite`` was set. Raised on every rank alike."""


class Listed(NamedTuple):
    """The trainable tensors of a list, each once, and the gradients that they have now.

    Attributes:
        names: how to call each in a message.
        replicas: of each, the ranks that hold the same part of it, this one among them.
        scope: the ranks that share the model.
        peers: those that must list the same: all of the scope, or this rank's pipeline stage.
        error: why the gradients cannot be measured; the ranks must tell each other before one of them raises.
    """

    tensors: list[Any]
    gradients: list[ms.Tensor | None]
    names: list[str]
    replicas: list[tuple[int, ...]]
    scope: Group
    peers: tuple[int, ...]
    error: str | None


class Measured(NamedTuple):
    """Every rank's record in the order of the scope's ranks, what follows from them, and which gradients count on this rank."""

    records: tuple[RankRecord, ...]
    conclusion: Conclusion
    counts: tuple[bool, ...]


def listed(tensors: Sequence[Any], names: Sequence[str] | None, mesh: ParallelMesh | None, *, are_gradients: bool) -> Listed:
    """Look at a list of parameters, or of gradients.

    Raises:
        TypeError: an entry is no tensor.
        ValueError: parameters on other ranks than ``mesh``.
    """
    kept: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, ms.Tensor):
            raise TypeError(f"entry {index} of the list is a {type(tensor).__name__}, not a MindSpore tensor")
        if are_gradients or tensor.requires_grad:
            kept.setdefault(id(tensor), index)
    chosen = [tensors[index] for index in kept.values()]
    called = [names[index] if names else f"index {index}" for index in kept.values()]
    gradients = chosen if are_gradients else [gradient_of(tensor) for tensor in chosen]
    scope = _scope(tensors, mesh)
    peers = group(mesh, "dp_replicate", "dp_shard", "tp").ranks if mesh else scope.ranks
    replicas = [_replicas(tensor, peers) for tensor in chosen]
    return Listed(chosen, list(gradients), called, replicas, scope, peers, _error(chosen, gradients, called))


def require_finished(found: Listed) -> None:
    """
    Raises:
        UnfinishedGradientsError: a shared parameter's gradient is only this rank's part of it.
    """
    pairs = zip(found.names, found.tensors, strict=True)
    unfinished = [name for name, tensor in pairs if shared_groups(tensor) and not is_finished(tensor)]
    if unfinished:
        raise UnfinishedGradientsError(
            f"{len(unfinished)} parameters (first: {unfinished[0]}) are shared with other ranks, and each rank still holds a part of "
            "the gradient; call hyper_parallel.finish_gradients(model, mesh) between backward and the clip"
        )


def measure(found: Listed, p: float) -> Measured:
    """The global norm. One collective; three where some parameter has a gradient on one rank and none on a peer.

    Raises:
        GradientMismatchError: the ranks' lists of parameters differ; on every rank.
        ValueError: some rank has a gradient that cannot be measured; on every rank.
    """
    here = collectives.rank()
    counts = [_lowest(tensor, replicas) == here for tensor, replicas in zip(found.tensors, found.replicas, strict=True)]
    measured = _exchange(found, counts, p)
    if measured.conclusion.errors:
        messages = zip(found.scope.ranks, collectives.gather_objects(found.error, found.scope), strict=True)
        raise ValueError("; ".join(f"rank {rank}: {message}" for rank, message in messages if message))
    if measured.conclusion.list_differs:
        raise GradientMismatchError(_difference(found, measured.conclusion.list_differs))
    if measured.conclusion.gradients_missing:
        measured = _exchange(found, _counts_among_holders(found), p)
    return measured


def require_finite(found: Listed, measured: Measured, p: float) -> None:
    """Raise on every rank alike where the global norm is NaN or infinite.

    Raises:
        NonFiniteNormError: naming the ranks and their parameters with non-finite gradients.
    """
    if math.isfinite(measured.conclusion.norm):
        return
    mine = [
        name
        for name, gradient in zip(found.names, found.gradients, strict=True)
        if gradient is not None and gradient.size and not math.isfinite(norm_of([gradient], math.inf))
    ]
    by_rank = zip(found.scope.ranks, collectives.gather_objects(mine, found.scope), strict=True)
    where = "; ".join(f"rank {rank}: {_shortened(names)}" for rank, names in by_rank if names)
    raise NonFiniteNormError(
        f"the gradient norm of order {p:g} is {measured.conclusion.norm}; gradients that are not finite: "
        f"{where or 'none alone, the norm itself overflows'}. Nothing was clipped."
    )


def norm_of(gradients: Sequence[ms.Tensor], p: float) -> float:
    """The p-norm of tensors taken as one vector, within 1e-7 of the exact one.

    It is computed on the host, in torch's arithmetic: MindSpore has no float64 accumulation on Ascend, and most of the operations that
    it takes are missing on a CPU.
    """
    import torch

    from hyper_parallel.platform.torch.grad_norm.local import norm_of_many

    if on_host():
        return norm_of_many([writable(gradient) for gradient in gradients], p)
    return norm_of_many([torch.from_numpy(g.astype(ms.float32).asnumpy()) for g in gradients], p)


def scale(gradients: Sequence[ms.Tensor], coefficient: float) -> None:
    """Multiply each gradient once, in place, by ``coefficient`` rounded to the gradient's own dtype."""
    for gradient in {id(gradient): gradient for gradient in gradients}.values():
        if not gradient.size:
            continue
        flat = writable(gradient)
        if on_host():
            import torch

            flat.mul_(torch.tensor(coefficient, dtype=flat.dtype))
        else:
            flat.mul_(ms.Tensor(coefficient, gradient.dtype))


def _exchange(found: Listed, counts: Sequence[bool], p: float) -> Measured:
    gradients = found.gradients if found.error is None else [None] * len(found.gradients)
    there = [(g, counted) for g, counted in zip(gradients, counts, strict=True) if g is not None]
    counted = [g for g, counts_here in there if counts_here]
    contributed = norm_of(counted, p)
    uncounted = [g for g, counts_here in there if not counts_here]
    alike = set(found.replicas)
    present = bytes(g is not None for g in found.gradients)
    record = RankRecord(
        contributed=contributed,
        held=combine([contributed, norm_of(uncounted, p)], p) if uncounted else contributed,
        with_gradient=len(there),
        without_gradient=len(found.gradients) - len(there),
        elements=sum(g.size for g in counted),
        parameters=fingerprint("\n".join(map(_described, found.tensors))) if found.tensors else 0,
        peers=fingerprint(repr(found.peers)),
        present=fingerprint(present),
        replicas=fingerprint(repr(alike.pop())) if len(alike) == 1 and found.error is None else 0,
        float64=any(g.dtype == ms.float64 for g, _ in there),
        error=found.error is not None,
    )
    records = tuple(RankRecord(*numbers) for numbers in collectives.gather_numbers(record, found.scope))
    return Measured(records, conclude(records, p), tuple(counts))


def _error(tensors: Sequence[Any], gradients: Sequence[ms.Tensor | None], names: Sequence[str]) -> str | None:
    """What is wrong with the first gradient that has no norm, or is not the parameter's own."""
    for tensor, gradient, name in zip(tensors, gradients, names, strict=True):
        if gradient is None:
            continue
        if gradient.dtype not in _FLOATING:
            return f"the gradient of {name} is {gradient.dtype}; a norm needs float64, float32, bfloat16 or float16"
        if gradient.shape != tensor.shape:
            return f"the gradient of {name} has shape {tuple(gradient.shape)}, the parameter on this rank {tuple(tensor.shape)}"
    return None


def _scope(tensors: Sequence[Any], mesh: ParallelMesh | None) -> Group:
    stages = {where.stage.ranks: where.stage for where in map(place, tensors) if where is not None}
    if mesh is None:
        if len(stages) > 1:
            raise ValueError(f"parameters lie on different ranks ({'; '.join(map(str, sorted(stages)))}); pass mesh=, which spans them all")
        return next(iter(stages.values())) if stages else Group((collectives.rank(),), 0, None)
    whole = whole_group(mesh)
    for ranks in stages:
        if not set(ranks) <= set(whole.ranks):
            raise ValueError(f"parameters lie on ranks {ranks}, but mesh= spans only ranks {whole.ranks}")
    return whole


def _replicas(tensor: Any, peers: tuple[int, ...]) -> tuple[int, ...]:
    where = place(tensor)
    return where.replicas if where is not None else peers


def _lowest(tensor: Any, replicas: tuple[int, ...]) -> int:
    """The rank that counts: the lowest of all that hold this part, those included that :func:`mark_shared` told of."""
    return min(rank for ranks in (replicas, *(g.ranks for g in shared_groups(tensor))) for rank in ranks)


def _counts_among_holders(found: Listed) -> list[bool]:
    """Of the replicas of each part, the lowest rank whose parameter has a gradient counts it."""
    present = [g is not None for g in found.gradients]
    gathered = collectives.gather_objects((found.peers, present), found.scope)
    by_rank = {
        rank: bits
        for rank, (peers, bits) in zip(found.scope.ranks, gathered, strict=True)
        if peers == found.peers and len(bits) == len(present)
    }
    here = collectives.rank()
    counts = []
    for index, replicas in enumerate(found.replicas):
        holders = [rank for rank in replicas if by_rank.get(rank, present)[index]]
        counts.append(not holders or holders[0] == here)
    return counts


def _described(tensor: Any) -> str:
    where = place(tensor)
    return where.description if where is not None else f"{tuple(tensor.shape)} on every rank"


def _difference(found: Listed, positions: Sequence[int]) -> str:
    lists = collectives.gather_objects([_described(tensor) for tensor in found.tensors], found.scope)
    odd = positions[0]
    usual = next(i for i, entries in enumerate(lists) if i not in positions and entries)
    pairs = zip(lists[usual], lists[odd], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(lists[usual]), len(lists[odd])))
    ranks = found.scope.ranks
    return (
        f"rank{'s' * (len(positions) > 1)} {', '.join(str(ranks[i]) for i in positions)} list{'s' * (len(positions) == 1)} other "
        f"parameters than the others. First difference at index {at}: rank {ranks[usual]} has {_entry(lists[usual], at)}, "
        f"rank {ranks[odd]} has {_entry(lists[odd], at)}. "
        "Pass the same parameters in the same order on every rank, those without a gradient too."
    )


def _entry(entries: list[str], index: int) -> str:
    return entries[index] if index < len(entries) else f"nothing (its list ends after {len(entries)})"


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
