"""Clip gradients by their global norm on MindSpore: the contract of :mod:`hyper_parallel.platform.torch.clip_grad`, for Cells and
Parameters whose gradients are in ``grad`` (or ``main_grad``), where ``fully_shard`` and the pipeline put them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.norm import check_max_norm, clip_coefficient, parse_norm_type
from hyper_parallel.platform.mindspore.finish_gradients import Parameters, as_list
from hyper_parallel.platform.mindspore.grad_norm import (
    Listed,
    Measured,
    listed,
    measure,
    require_finished,
    require_finite,
    scale,
)
from hyper_parallel.platform.mindspore.layout import gradient_of
from hyper_parallel.platform.mindspore.norm_parts import NormPart, norm_parts


class RankPart(NamedTuple):
    """What one rank has to do with the global norm.

    Attributes:
        rank: global rank.
        with_gradient, without_gradient: trainable parameters with and without a gradient there.
        held: norm of all gradient elements that the rank holds.
        contributed: norm of those that count there; their combination over all ranks is the global norm.
    """

    rank: int
    with_gradient: int
    without_gradient: int
    held: float
    contributed: float


class GradNormReport(NamedTuple):
    """The global norm and its parts, the same on every rank.

    Attributes:
        norm: 0-dim, float32 (float64 if a gradient of any rank is).
        clip_coefficient: by what the gradients were multiplied; 1.0 where nothing was written.
        parts: one per rank, ascending.
        replicas_differ: ranks that hold replicas of the same gradients with different norms.
        classes: what each class of parameter contributes; empty unless asked for.
        parameters: what each parameter contributes; empty unless asked for.
    """

    norm: ms.Tensor
    clip_coefficient: float
    parts: tuple[RankPart, ...]
    replicas_differ: tuple[tuple[int, ...], ...]
    classes: tuple[NormPart, ...] = ()
    parameters: tuple[NormPart, ...] = ()


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: ParallelMesh | None = None,
) -> ms.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before clipping.

    Args:
        parameters: a cell, several (the stages of a pipeline), a parameter, or any iterable of parameters (a generator too), in the
            same order on all ranks, those without a gradient included.
        max_norm: the bound; ``inf`` measures and writes nothing.
        norm_type: p >= 0, ``inf`` or ``-inf``, as a number or a string.
        error_if_nonfinite: raise where the norm is NaN or infinite; else the gradients are left as they are then.
        foreach: accepted for torch's signature, and changes nothing.
        mesh: the ranks that share one model when the parameters do not show it: a pipeline, or ranks whose list may be empty.
            Without it: the ranks over which the parameters are sharded, and no collective where none is.

    Returns:
        The global norm, 0-dim, float32 (float64 if a gradient is); the same bits on every rank. 0 where there is no gradient.

    Raises:
        NonFiniteNormError: (a RuntimeError) with ``error_if_nonfinite``, on all ranks alike, naming ranks and parameters.
        GradientMismatchError: (a RuntimeError) the ranks list different parameters.
        UnfinishedGradientsError: (a RuntimeError) shared parameters, and :func:`finish_gradients` was not called.
        ValueError: ``max_norm`` negative or NaN, ``norm_type`` not a norm; on all ranks alike, a gradient that has no norm.
    """
    p, bound = parse_norm_type(norm_type), check_max_norm(max_norm)
    found, measured = _measured(parameters, p, error_if_nonfinite, mesh)
    norm = _norm_tensor(measured)
    _clip(found.gradients, float(norm), bound)
    return norm


def grad_norm_report(
    parameters: Parameters,
    max_norm: float = math.inf,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: ParallelMesh | None = None,
    per_class: bool = False,
    per_parameter: bool = False,
) -> GradNormReport:
    """:func:`clip_grad_norm_` that also returns the parts of the norm. Without ``max_norm`` it measures only.

    Args:
        per_class, per_parameter: also tell what each class of parameter, or each parameter, contributed before clipping; one
            more collective, for which every rank must ask alike.
    """
    p, bound = parse_norm_type(norm_type), check_max_norm(max_norm)
    found, measured = _measured(parameters, p, error_if_nonfinite, mesh)
    by_class, by_parameter = norm_parts(found, measured, p) if per_class or per_parameter else ((), ())
    norm = _norm_tensor(measured)
    coefficient = _clip(found.gradients, float(norm), bound)
    ranks = found.scope.ranks
    parts = tuple(
        RankPart(rank, int(r.with_gradient), int(r.without_gradient), r.held, r.contributed)
        for rank, r in zip(ranks, measured.records, strict=True)
    )
    differ = tuple(tuple(ranks[i] for i in positions) for positions in measured.conclusion.replicas_differ)
    return GradNormReport(norm, coefficient, parts, differ, by_class if per_class else (), by_parameter if per_parameter else ())


def get_total_norm(
    tensors: Parameters,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: ParallelMesh | None = None,
) -> ms.Tensor:
    """The global norm of gradient ``tensors`` (not parameters), as :func:`clip_grad_norm_` measures it.

    A gradient that ``fully_shard`` made knows of what it is a part. Every rank must pass the same list.

    Raises:
        NonFiniteNormError, GradientMismatchError, ValueError: as :func:`clip_grad_norm_`.
    """
    p = parse_norm_type(norm_type)
    found = listed(as_list(tensors), None, mesh, are_gradients=True)
    measured = measure(found, p)
    if error_if_nonfinite:
        require_finite(found, measured, p)
    return _norm_tensor(measured)


def clip_grads_with_norm_(
    parameters: Parameters, max_norm: float, total_norm: ms.Tensor | float, foreach: bool | None = None
) -> None:
    """Scale the gradients of ``parameters`` by ``max_norm / (total_norm + 1e-6)`` where that is below 1.

    No collective: ``total_norm`` must be the same on every rank, as :func:`get_total_norm` returns it. A non-finite norm
    changes nothing.

    Raises:
        ValueError: ``max_norm`` negative or NaN, ``total_norm`` negative.
    """
    bound, norm = check_max_norm(max_norm), float(total_norm)
    if norm < 0:
        raise ValueError(f"total_norm must be a norm, which is never negative, not {norm!r}")
    _clip([gradient_of(tensor) for tensor in _tensors(parameters)[0] if tensor.requires_grad], norm, bound)


def _measured(
    parameters: Parameters, p: float, error_if_nonfinite: bool, mesh: ParallelMesh | None
) -> tuple[Listed, Measured]:
    tensors, names = _tensors(parameters)
    found = listed(tensors, names, mesh, are_gradients=False)
    require_finished(found)
    measured = measure(found, p)
    if error_if_nonfinite:
        require_finite(found, measured, p)
    return found, measured


def _clip(gradients: Sequence[ms.Tensor | None], norm: float, max_norm: float) -> float:
    if not math.isfinite(norm):
        return 1.0
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient < 1.0:
        scale([gradient for gradient in gradients if gradient is not None], coefficient)
    return coefficient


def _tensors(parameters: Parameters) -> tuple[list[Any], list[str] | None]:
    """The tensors, each iterable read once, and their names where cells were given."""
    entries = as_list(parameters)
    if entries and isinstance(entries[0], ms.nn.Cell):
        pairs = [pair for cell in entries for pair in cell.parameters_and_names()]
        return [parameter for _, parameter in pairs], [name for name, _ in pairs]
    return entries, None


def _norm_tensor(measured: Measured) -> ms.Tensor:
    return ms.Tensor(measured.conclusion.norm, ms.float64 if measured.conclusion.float64 else ms.float32)
