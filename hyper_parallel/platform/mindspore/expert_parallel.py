"""Expert parallelism: the experts of a layer are spread over the ``ep`` axis, tokens travel to them and back
(Lepikhin et al., "GShard", 2020).

``ep`` is carved out of the data-parallel ranks: ``dp_shard`` is ``dpm`` times ``ep``. An expert is sharded over the ``dpm`` ranks that
hold it, so what it learns from all tokens of the batch is added up by the two together and needs no factor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import mindspore as ms
import numpy as np

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan, matching
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.autograd import Function
from hyper_parallel.platform.mindspore.collectives import Group
from hyper_parallel.platform.mindspore.layout import TensorCut, note_tensor_cut
from hyper_parallel.platform.mindspore.mesh import expert_group, group
from hyper_parallel.platform.mindspore.tensor_parallel import cut_piece
from hyper_parallel.platform.mindspore.tensors import empty, on_host, writable

Compute = Callable[[ms.Tensor, list[int]], ms.Tensor]


class ExpertDispatch:
    """Sorts rows by expert, computes them where their expert is, and puts the results back in order.

    Args:
        experts: how many there are on all ranks together.
        group: the ranks that share them, each with an equal, consecutive part; None where this rank has all.
    """

    def __init__(self, experts: int, group: Group | None = None) -> None:
        self.experts = experts
        self.group = group

    def __call__(self, rows_MD: ms.Tensor, expert_M: ms.Tensor, compute: Compute) -> ms.Tensor:
        """Apply each row's expert to it.

        Args:
            rows_MD: (rows, hidden size).
            expert_M: the expert of each row, integers; they are looked at on the host.
            compute: takes the rows of this rank's experts, sorted by expert, and how many each has.

        Returns:
            (rows, hidden size), in the order of ``rows_MD``.
        """
        chosen_M = expert_M.asnumpy().ravel()
        order_M = np.argsort(chosen_M, kind="stable")
        counts_E = np.bincount(chosen_M, minlength=self.experts)
        sorted_MD = _permuted(rows_MD, order_M)
        if self.group is None:
            out_MD = compute(sorted_MD, counts_E.tolist())
        else:
            out_MD = self._elsewhere(sorted_MD, counts_E, compute, self.group)
        return _permuted(out_MD, _inverse(order_M))

    def _elsewhere(self, rows_MD: ms.Tensor, counts_E: Any, compute: Compute, ranks: Group) -> ms.Tensor:
        here = self.experts // ranks.size
        counts = ms.Tensor(counts_E.astype(np.int32))
        arriving = collectives.all_to_all(counts, ranks, [here] * ranks.size, [here] * ranks.size).wait()
        arriving_RE = arriving.asnumpy().reshape(ranks.size, here)
        sent, received = counts_E.reshape(ranks.size, here).sum(1).tolist(), arriving_RE.sum(1).tolist()
        rows_MD = _Travel.apply(rows_MD, received, sent, ranks)
        # from each rank in turn, rows for each of the experts here
        expert_M = np.repeat(np.tile(np.arange(here), ranks.size), arriving_RE.ravel())
        order_M = np.argsort(expert_M, kind="stable")
        out_MD = compute(_permuted(rows_MD, order_M), np.bincount(expert_M, minlength=here).tolist())
        return _Travel.apply(_permuted(out_MD, _inverse(order_M)), sent, received, ranks)


def apply_expert_parallel(model: ms.nn.Cell, mesh: ParallelMesh, plan: ParallelPlan) -> list[ms.nn.Cell]:
    """Leave on each rank its part of every layer's experts, in place; all ranks must hold the same values before.

    Returns:
        The cells that hold experts, in forward order; each has an attribute ``dispatch`` (:class:`ExpertDispatch`).
    """
    found = [
        (name, cell) for name, cell in model.cells_and_names() if any(fnmatchcase(name, pattern) for pattern in plan.experts)
    ]
    for prefix, cell in found:
        for name, parameter in cell._params.items():
            if parameter is None:
                continue
            dim = plan.tensor_dim(f"{prefix}.{name}")
            kept = cut_piece(parameter, 0, expert_group(mesh)) if mesh.ep > 1 else parameter
            if mesh.tp > 1:
                assert dim is not None, f"{prefix}.{name} has no dimension for tensor parallelism"
                kept = cut_piece(kept, dim, group(mesh, "tp"))
                note_tensor_cut(kept, TensorCut(dim))
            cell._params[name] = kept
        if mesh.ep > 1:
            dispatch = cell.dispatch
            assert isinstance(dispatch, ExpertDispatch)
            cell.dispatch = ExpertDispatch(dispatch.experts, expert_group(mesh))
    return [cell for _, cell in found]


def expert_shard_dims(model: ms.nn.Cell, plan: ParallelPlan) -> Callable[[ms.Parameter], int | None]:
    """The dimension along which each expert parameter is sharded."""
    dims = {
        id(parameter): matching(plan.expert_shard_dims, f"{prefix}.{name}")
        for prefix, cell in model.cells_and_names()
        for name, parameter in cell._params.items()
        if plan.is_expert(f"{prefix}.{name}")
    }
    return lambda parameter: dims.get(id(parameter))


def _permuted(rows: ms.Tensor, order: Any) -> ms.Tensor:
    return _Permute.apply(rows, order)


def _inverse(order: Any) -> Any:
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back


class _Permute(Function):
    """Rows in another order. (MindSpore has no bfloat16 gather on a CPU, nor its gradient.)"""

    @staticmethod
    def forward(ctx: Any, rows: ms.Tensor, order: Any) -> ms.Tensor:
        ctx.order = order
        return _taken(rows, order)

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        return _taken(gradient, _inverse(ctx.order)), None


class _Travel(Function):
    """Rows to other ranks; backward, their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: ms.Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> ms.Tensor:
        ctx.way = (sent, received, group)
        return collectives.all_to_all(rows.contiguous(), group, received, sent, rows.shape[1]).wait()

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        received, sent, group = ctx.way
        back = collectives.all_to_all(gradient.contiguous(), group, received, sent, gradient.shape[1]).wait()
        return back, None, None, None


def _taken(rows: ms.Tensor, order: Any) -> ms.Tensor:
    if not on_host():
        return ms.mint.index_select(rows, 0, ms.Tensor(order.astype(np.int32)))
    import torch

    made = empty(rows.shape, rows.dtype)
    if made.size:
        torch.index_select(writable(rows.contiguous()), 0, torch.from_numpy(order), out=writable(made))
    return made
