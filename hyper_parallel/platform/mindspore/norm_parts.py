"""The parts of a norm: by class of parameter and by parameter, for tables and for finding out what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hyper_parallel.core.flat_buffer import split_by
from hyper_parallel.core.norm import combine
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.finish_gradients import shared_groups
from hyper_parallel.platform.mindspore.grad_norm import Listed, Measured, norm_of
from hyper_parallel.platform.mindspore.layout import place
from hyper_parallel.platform.mindspore.tensors import on_host


class NormPart(NamedTuple):
    """What some parameters contribute to the global norm.

    Attributes:
        name: a class ("sharded", "expert", "shared", "plain"), or a parameter: its name where a cell was given, else its index.
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


def norm_parts(found: Listed, measured: Measured, p: float) -> tuple[tuple[NormPart, ...], tuple[NormPart, ...]]:
    """The parts by class and by parameter, the same on every rank. Collective: one gather of Python objects."""
    mine = []
    for name, tensor, gradient, counts in zip(found.names, found.tensors, found.gradients, measured.counts, strict=True):
        if gradient is not None:
            elements = gradient.size if counts else 0
            norm = norm_of([gradient], p) if elements else 0.0
            mine.append(_Piece(name, _kind(tensor), _is_offloaded(gradient), norm, elements))
    gathered = collectives.gather_objects(mine, found.scope)
    entries = [(rank, _Piece(*piece)) for rank, pieces in zip(found.scope.ranks, gathered, strict=True) for piece in pieces]
    by_class = (((entry[1].kind, entry[1].offloaded), entry) for entry in entries)
    by_parameter = (((entry[1].parameter, entry[1].offloaded), entry) for entry in entries)
    return _combined(by_class, p), _combined(by_parameter, p)


def _combined(entries: Iterable[tuple[tuple[str, bool], tuple[int, _Piece]]], p: float) -> tuple[NormPart, ...]:
    parts = []
    for (name, offloaded), members in split_by(entries).items():
        counted = [(rank, piece) for rank, piece in members if piece.elements]
        norm = combine([piece.norm for _, piece in counted], p) if counted else 0.0
        elements = sum(piece.elements for _, piece in counted)
        parts.append(NormPart(name, offloaded, norm, elements, tuple(sorted({rank for rank, _ in counted}))))
    return tuple(parts)


def _kind(tensor: Any) -> str:
    if shared_groups(tensor):
        return "shared"
    where = place(tensor)
    return where.kind if where is not None else "plain"


def _is_offloaded(gradient: Any) -> bool:
    return not on_host() and gradient.device.upper().startswith("CPU")
