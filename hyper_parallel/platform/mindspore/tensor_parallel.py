"""Tensor and sequence parallelism: parameters are cut over the ``tp`` axis, activations are gathered and summed at the borders of
regions, where :class:`~hyper_parallel.core.plan.ParallelPlan` puts them.

A region sees the whole sequence and computes its part of a layer, so every gradient inside it that is not cut is a part too, on every
rank; so is every gradient outside where the sequence is cut. Those parts are added up with the replicas, in the fused buffers of
``fully_shard``.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import mindspore as ms
from mindspore import mint

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.sharding import piece
from hyper_parallel.platform.mindspore.activations import (
    all_reduce,
    gather,
    reduce_scatter,
    split,
    sum_gradients,
)
from hyper_parallel.platform.mindspore.cells import extend
from hyper_parallel.platform.mindspore.collectives import Group
from hyper_parallel.platform.mindspore.layout import TensorCut, note_tensor_cut
from hyper_parallel.platform.mindspore.mesh import group
from hyper_parallel.platform.mindspore.tensors import copied, writable

_SEQUENCE = 1  # activations are (batch, sequence, ...)
_TP = "_hyper_parallel_tp"


def apply_tensor_parallel(model: ms.nn.Cell, mesh: ParallelMesh, plan: ParallelPlan) -> None:
    """Cut the parameters of ``model`` as ``plan`` says and put the communication at the borders of its regions, in place.

    Every rank must hold the same values before. To be called before ``fully_shard``, which reduces what is left in parts.
    """
    tp = group(mesh, "tp")
    cut_parameters(model, tp, plan)
    for name, cell in list(model.cells_and_names()):
        on_sequence = not plan.sees_whole_sequence(name)
        if any(fnmatchcase(name, pattern) for pattern in plan.regions):
            extend(cell, _Region, {_TP: _Border(tp, on_sequence)})
        elif name == plan.embedding:
            extend(cell, _Embedding, {_TP: _Border(tp, on_sequence)})
        elif name == plan.head:
            extend(cell, _Head, {_TP: _Border(tp, on_sequence)})
        elif name in plan.sequence_entrances and plan.sequence_parallel:
            extend(cell, _Entrance, {_TP: _Border(tp, on_sequence)})


def cut_parameters(model: ms.nn.Cell, tp: Group, plan: ParallelPlan) -> None:
    """Leave on each rank its piece of every parameter that ``plan`` cuts, and note on the others whether their gradients are
    parts. Experts are left to expert parallelism."""
    known: dict[int, ms.Parameter] = {}
    for prefix, cell in model.cells_and_names():
        for name, parameter in cell._params.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if parameter is None or plan.is_expert(full_name):
                continue
            if id(parameter) not in known:  # tied parameters stay tied
                known[id(parameter)] = _cut(parameter, full_name, tp, plan)
            cell._params[name] = known[id(parameter)]


def cut_piece(parameter: ms.Parameter, dim: int, ranks: Group) -> ms.Parameter:
    """A new parameter: this rank's piece of ``parameter``, cut along ``dim`` over ``ranks``."""
    start, length = piece(parameter.shape[dim], ranks.size, ranks.position)
    values = copied(parameter)
    kept = ms.mint.empty((*parameter.shape[:dim], length, *parameter.shape[dim + 1 :]), dtype=parameter.dtype)
    if kept.size:
        writable(kept).copy_(writable(values).narrow(dim, start, length))
    return ms.Parameter(kept, name=parameter.name, requires_grad=parameter.requires_grad)


def _cut(parameter: ms.Parameter, name: str, tp: Group, plan: ParallelPlan) -> ms.Parameter:
    dim = plan.tensor_dim(name)
    if dim is None:
        note_tensor_cut(parameter, TensorCut(None, partial=plan.in_region(name) or not plan.sees_whole_sequence(name)))
        return parameter
    kept = cut_piece(parameter, dim, tp)
    note_tensor_cut(kept, TensorCut(dim))
    return kept


class _Border:
    """How activations enter and leave what computes on cut parameters: whole, or as this rank's share of the sequence."""

    def __init__(self, tp: Group, on_sequence: bool) -> None:
        self.tp, self.on_sequence = tp, on_sequence

    def enter(self, x: ms.Tensor) -> ms.Tensor:
        """The whole sequence on every rank. Backward, the ranks' gradients are added up."""
        return gather(x, _SEQUENCE, self.tp) if self.on_sequence else sum_gradients(x, self.tp)

    def leave(self, y: ms.Tensor) -> ms.Tensor:
        """The ranks' outputs added up."""
        return reduce_scatter(y, _SEQUENCE, self.tp) if self.on_sequence else all_reduce(y, self.tp)


class _Region:
    """Mixed into a cell that computes its part of a layer."""

    def construct(self, x: ms.Tensor, *arguments: Any, **options: Any) -> ms.Tensor:
        """The layer's output from all ranks' parts."""
        border: _Border = self.__dict__[_TP]
        return border.leave(super().construct(border.enter(x), *arguments, **options))  # type: ignore[misc]


class _Head:
    """Mixed into the cell that gives logits, which stay cut along the vocabulary."""

    def construct(self, x: ms.Tensor, *arguments: Any, **options: Any) -> ms.Tensor:
        """This rank's part of the vocabulary's logits."""
        return super().construct(self.__dict__[_TP].enter(x), *arguments, **options)  # type: ignore[misc]


class _Entrance:
    """Mixed into a cell whose output is whole on every rank and goes on as shares of the sequence."""

    def construct(self, *arguments: Any, **options: Any) -> ms.Tensor:
        """This rank's share of the sequence."""
        return split(super().construct(*arguments, **options), _SEQUENCE, self.__dict__[_TP].tp)  # type: ignore[misc]


class _Embedding:
    """Mixed into an embedding of which each rank holds some rows: rows of others give zeros, and the outputs are added up."""

    def construct(self, ids: ms.Tensor, *arguments: Any, **options: Any) -> ms.Tensor:
        """The embeddings of ``ids``, whole or this rank's share of the sequence."""
        border: _Border = self.__dict__[_TP]
        rows = _rows_of(self)
        row = ids - rows * border.tp.position
        here = mint.logical_and(row >= 0, row < rows)
        output = super().construct(mint.clamp(row, 0, max(rows - 1, 0)), *arguments, **options)  # type: ignore[misc]
        return border.leave(output * mint.unsqueeze(here.astype(output.dtype), -1))


def _rows_of(cell: Any) -> int:
    """Rows of an embedding on this rank; every rank has as many, which the check of a layout demands."""
    return int(cell.weight.shape[0])
