"""Clip gradients by their global norm: right on every layout, and the same bits on every rank.

Drop-in for ``torch.nn.utils.clip_grad_norm_`` and its two halves. What differs, on purpose:

* Each element of the model's gradient counts exactly once, whatever the layout: a shard once, a replica once, a
  parameter listed twice once, a frozen parameter never.
* The norm is within 1e-7 of the float64 norm of the same gradients, at any size and magnitude.
* ``norm_type=0`` counts non-zero *elements*, since the layout must not matter; torch counts tensors of non-zero norm.
* A parameter's ``main_grad`` is used before its ``.grad``.
* Non-finite norms leave the gradients untouched (torch turns them into NaN or zeros).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.norm import check_max_norm, clip_coefficient, parse_norm_type
from hyper_parallel.platform.torch.grad_norm.combine import Measured, measure, require_finite
from hyper_parallel.platform.torch.grad_norm.parts import NormPart, norm_parts
from hyper_parallel.platform.torch.grad_norm.plan import Found, GradientPlan, locate
from hyper_parallel.platform.torch.grad_norm.two_float import supports_float64
from hyper_parallel.platform.torch.mesh import device_mesh
from hyper_parallel.platform.torch.shared import remembered_mesh

_Function = TypeVar("_Function", bound=Callable[..., Any])
Parameters: TypeAlias = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | Sequence[torch.nn.Module]


def _outside_autograd(function: _Function) -> _Function:
    """Record nothing, and read attributes of DTensors directly: asking each one for a ``__torch_function__`` that it has
    switched off would take longer than everything else that is done per parameter."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **options)

    return wrapped  # type: ignore[return-value]


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
        norm: 0-dim, float32 (float64 if a gradient of any rank is), on the device of this rank's first gradient.
        clip_coefficient: by what the gradients were multiplied, but for a loss scale; 1.0 where nothing was clipped.
        parts: one per rank, ascending.
        replicas_differ: ranks that hold replicas of the same gradients with different norms.
        classes: what each class of parameter contributes; empty unless asked for.
        parameters: what each parameter contributes; empty unless asked for.
    """

    norm: torch.Tensor
    clip_coefficient: float
    parts: tuple[RankPart, ...]
    replicas_differ: tuple[tuple[int, ...], ...]
    classes: tuple[NormPart, ...] = ()
    parameters: tuple[NormPart, ...] = ()


@_outside_autograd
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | ParallelMesh | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before clipping.

    Args:
        parameters: a module, several (the stages of a pipeline), a tensor, or any iterable of parameters (a generator too), in
            the same order on all ranks, those without a gradient included.
        max_norm: the bound; ``inf`` measures and writes nothing.
        norm_type: p >= 0, ``inf`` or ``-inf``, as a number or a string.
        error_if_nonfinite: raise where the norm is NaN or infinite.
        foreach: False scales gradient by gradient; anything else by groups.
        mesh: the ranks that share one model when the parameters do not show it: a pipeline, or ranks whose list may be
            empty. Without it: the whole mesh of a pipeline stage that ``parallelize`` made; else the ranks of the parameters' own
            meshes, and no collective where no parameter is a DTensor.

    Returns:
        The global norm, 0-dim, float32 (float64 if a gradient is), on the first gradient's device; the same bits on every
        rank. 0 where there is no gradient.

    Raises:
        NonFiniteNormError: (a RuntimeError) with ``error_if_nonfinite``, on all ranks alike, naming ranks and parameters.
        GradientMismatchError: (a RuntimeError) the ranks list different parameters.
        UnfinishedGradientsError: (a RuntimeError) shared parameters, and :func:`finish_gradients` was not called.
        ValueError: ``max_norm`` negative or NaN, ``norm_type`` not a norm.
    """
    p, bound = parse_norm_type(norm_type), check_max_norm(max_norm)
    tensors = _listed(parameters)
    plan, measured, norm = _measured(parameters, tensors, p, error_if_nonfinite, mesh)
    _clipped(plan, measured, tensors, float(norm), bound, foreach)
    return norm


@_outside_autograd
def grad_norm_report(
    parameters: Parameters,
    max_norm: float = math.inf,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | ParallelMesh | None = None,
    loss_scale: float = 1.0,
    per_class: bool = False,
    per_parameter: bool = False,
) -> GradNormReport:
    """:func:`clip_grad_norm_` that also returns the parts of the norm. Without ``max_norm`` it measures only.

    Args:
        loss_scale: what the loss was multiplied by before backward. Norm and parts are those of the gradients divided by it, and
            where the norm is finite the gradients are divided by it too, in the same pass as they are clipped.
        per_class, per_parameter: also tell what each class of parameter, or each parameter, contributed before clipping; one
            more collective, for which every rank must ask alike.
    """
    p, bound = parse_norm_type(norm_type), check_max_norm(max_norm)
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(f"loss_scale must be a finite number above 0, not {loss_scale!r}")
    tensors = _listed(parameters)
    plan, measured, norm = _measured(parameters, tensors, p, error_if_nonfinite, mesh)
    unit = loss_scale if p else 1.0  # a count of elements has no scale
    norm = norm / unit
    classes: tuple[NormPart, ...] = ()
    single: tuple[NormPart, ...] = ()
    if per_class or per_parameter:
        classes, single = norm_parts(plan, measured, tensors, p, _module_names(parameters), unit)
    coefficient = _clipped(plan, measured, tensors, float(norm), bound, foreach, loss_scale)
    parts = tuple(
        RankPart(rank, int(r.with_gradient), int(r.without_gradient), r.held / unit, r.contributed / unit)
        for rank, r in zip(measured.ranks, measured.records, strict=True)
    )
    differ = tuple(tuple(measured.ranks[i] for i in group) for group in measured.conclusion.replicas_differ)
    return GradNormReport(
        norm, coefficient, parts, differ, classes if per_class else (), single if per_parameter else ()
    )


@_outside_autograd
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | ParallelMesh | None = None,
) -> torch.Tensor:
    """The global norm of gradient ``tensors`` (not parameters), as :func:`clip_grad_norm_` measures it.

    ``foreach`` is accepted for torch's signature and changes nothing. Every rank of the tensors' meshes must pass the same list.

    Raises:
        NonFiniteNormError, GradientMismatchError, ValueError: as :func:`clip_grad_norm_`.
    """
    p = parse_norm_type(norm_type)
    listed = _listed(tensors)
    plan, found = locate(listed, _as_device_mesh(mesh), are_gradients=True)
    measured = measure(plan, found, listed, p)
    if error_if_nonfinite:
        require_finite(measured, plan, p, None)
    return _norm_tensor(measured, plan)


@_outside_autograd
def clip_grads_with_norm_(
    parameters: Parameters, max_norm: float, total_norm: torch.Tensor | float, foreach: bool | None = None
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
    tensors = _listed(parameters)
    plan, found = locate(tensors, None, are_gradients=False)
    if found.error:
        raise found.error
    if _clip(found, norm, bound, foreach) < 1.0:
        plan.note_scaled(tensors)


def _measured(
    parameters: Parameters,
    tensors: Sequence[torch.Tensor],
    p: float,
    error_if_nonfinite: bool,
    mesh: DeviceMesh | ParallelMesh | None,
) -> tuple[GradientPlan, Measured, torch.Tensor]:
    """What every rank reported about the gradients of ``tensors``, and their norm."""
    plan, found = locate(
        tensors, _mesh_of(parameters, tensors, mesh), are_gradients=False, names=lambda: _module_names(parameters)
    )
    measured = measure(plan, found, tensors, p)
    if error_if_nonfinite:
        require_finite(measured, plan, p, _module_names(parameters))
    return plan, measured, _norm_tensor(measured, plan)


def _clipped(
    plan: GradientPlan,
    measured: Measured,
    tensors: Sequence[torch.Tensor],
    norm: float,
    max_norm: float,
    foreach: bool | None,
    loss_scale: float = 1.0,
) -> float:
    """The coefficient by which the gradients were clipped: multiplied, but for a loss scale."""
    found = measured.found
    if loss_scale == 1.0:
        coefficient = _clip(found, norm, max_norm, foreach)
    else:
        coefficient = clip_coefficient(norm, max_norm) if math.isfinite(norm) else 1.0
        if math.isfinite(norm):
            found.arrangement.scale(found.locals_, coefficient / loss_scale, foreach=foreach is not False)
    if coefficient < 1.0 or loss_scale != 1.0:
        plan.note_scaled(tensors)
    return coefficient


def _clip(found: Found, norm: float, max_norm: float, foreach: bool | None) -> float:
    if not math.isfinite(norm):
        return 1.0
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient < 1.0:
        found.arrangement.scale(found.locals_, coefficient, foreach=foreach is not False)
    return coefficient


def _listed(parameters: Any) -> Sequence[torch.Tensor]:
    """The tensors, each iterable read once: a second pass over a generator would find nothing."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    listed = parameters if isinstance(parameters, (list, tuple)) else list(parameters)
    if listed and isinstance(listed[0], torch.nn.Module):  # the stages of a pipeline on this rank
        return [parameter for module in listed for parameter in module.parameters()]
    return listed


def _module_names(parameters: Any) -> list[str] | None:
    modules = parameters if isinstance(parameters, (list, tuple)) else [parameters]
    if modules and isinstance(modules[0], torch.nn.Module):
        return [name for module in modules for name, _ in module.named_parameters()]
    return None


def _mesh_of(
    parameters: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | ParallelMesh | None
) -> DeviceMesh | None:
    """The mesh of the norm: as it was given, else that of the pipeline of which the parameters are a stage."""
    if mesh is None:
        mesh = remembered_mesh(parameters) or remembered_mesh(tensors)
    return _as_device_mesh(mesh)


def _as_device_mesh(mesh: DeviceMesh | ParallelMesh | None) -> DeviceMesh | None:
    return device_mesh(mesh) if isinstance(mesh, ParallelMesh) else mesh


def _norm_tensor(measured: Measured, plan: GradientPlan) -> torch.Tensor:
    found = measured.found
    device = found.tensors[0].device if found.tensors else plan.scope.device
    dtype = torch.float64 if measured.conclusion.float64 and supports_float64(device) else torch.float32
    return torch.tensor(measured.conclusion.norm, dtype=dtype, device=device)
