"""The parts of a norm: by class of parameter and by parameter, for tables and for finding out what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.core.norm import combine
from hyper_parallel.platform.torch.grad_norm.combine import Measured, gather_objects
from hyper_parallel.platform.torch.grad_norm.local import norm_of_many
from hyper_parallel.platform.torch.grad_norm.partial import added_up, is_partial
from hyper_parallel.platform.torch.grad_norm.plan import GradientPlan

CLASSES = ("sharded", "replicated", "expert", "shared", "plain")


class NormPart(NamedTuple):
    """What some parameters contribute to the global norm.

    Attributes:
        name: a class (one of ``CLASSES``), or a parameter: its name where a module was given, else its index in the list.
        offloaded: the gradients are in host memory while the ranks communicate on a device.
        norm: of their gradient elements, each counted once.
        elements: how many.
        ranks: the ranks that count some of them, ascending.
    """

    name: str
    offloaded: bool
    norm: float
    elements: int
    ranks: tuple[int, ...]


class _Piece(NamedTuple):
    parameter: str
    kind: str
    offloaded: bool
    norm: float
    elements: int


def norm_parts(
    plan: GradientPlan,
    measured: Measured,
    tensors: Sequence[torch.Tensor],
    p: float,
    names: Sequence[str] | None,
    unit: float,
) -> tuple[tuple[NormPart, ...], tuple[NormPart, ...]]:
    """The parts by class and by parameter, in multiples of ``unit``, the same on every rank. Collective: one gather of Python objects, and one reduction
    where gradients are Partial."""
    mine = _pieces(plan, measured, tensors, p, names)
    gathered = gather_objects(plan.scope, mine)
    by_class: dict[tuple[str, bool], list[tuple[int, _Piece]]] = {}
    by_parameter: dict[tuple[str, bool], list[tuple[int, _Piece]]] = {}
    for rank, pieces in zip(plan.scope.ranks, gathered, strict=True):
        for piece in map(_Piece._make, pieces):
            by_class.setdefault((piece.kind, piece.offloaded), []).append((rank, piece))
            by_parameter.setdefault((piece.parameter, piece.offloaded), []).append((rank, piece))
    return _combined(by_class, p, unit), _combined(by_parameter, p, unit)


def _combined(
    groups: dict[tuple[str, bool], list[tuple[int, _Piece]]], p: float, unit: float
) -> tuple[NormPart, ...]:
    parts = []
    for (name, offloaded), entries in groups.items():
        counted = [(rank, piece) for rank, piece in entries if piece.elements]
        norm = combine([piece.norm for _, piece in counted], p) if counted else 0.0
        elements = sum(piece.elements for _, piece in counted)
        parts.append(NormPart(name, offloaded, norm / unit, elements, tuple(sorted({rank for rank, _ in counted}))))
    return tuple(parts)


def _pieces(
    plan: GradientPlan, measured: Measured, tensors: Sequence[torch.Tensor], p: float, names: Sequence[str] | None
) -> list[_Piece]:
    found, chosen = measured.found, plan.chosen(tensors)
    indices = [index for index, there in enumerate(found.present) if there]
    partial = [position for position, gradient in enumerate(found.tensors) if is_partial(gradient)]
    values = dict(zip(partial, added_up([found.tensors[i] for i in partial]), strict=True)) if partial else {}
    pieces = []
    for position, (index, local) in enumerate(zip(indices, found.locals_, strict=True)):
        value = values.get(position, local)
        counts = measured.counts(index)
        elements = value.numel() if counts else 0
        norm = norm_of_many([value], p) if elements else 0.0
        offloaded = local.device.type == "cpu" and plan.scope.device.type != "cpu"
        pieces.append(_Piece(plan.name(index, names), _kind(plan, index, chosen[index]), offloaded, norm, elements))
    return pieces


def _kind(plan: GradientPlan, index: int, tensor: Any) -> str:
    if index in plan.tied:
        return "shared"
    if not isinstance(tensor, DTensor):
        return "plain"
    if "ep" in (tensor.device_mesh.mesh_dim_names or ()):
        return "expert"
    return "sharded" if any(placement.is_shard() for placement in tensor.placements) else "replicated"
