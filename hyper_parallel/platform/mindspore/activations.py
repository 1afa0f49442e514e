"""Communication of activations that autograd knows: each is the derivative of another.

    gather           <->  reduce_scatter      shares of a dimension, whole on every rank
    split             ->  all-gather          a whole that every rank holds, of which each goes on with its share
    all_reduce        ->  identity            parts added up, whole on every rank
    sum_gradients     ->  all-reduce          the identity, whose gradients are parts

Every share is as large as the others. Tensors may have any floating dtype; sums are made in it.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms

from hyper_parallel.core.flat_buffer import Slot
from hyper_parallel.core.precision import dtype_name
from hyper_parallel.core.sharding import shard_shape
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.autograd import Function
from hyper_parallel.platform.mindspore.collectives import Group
from hyper_parallel.platform.mindspore.tensors import copied, empty, read_whole, writable, write_whole


def gather(x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
    """The ranks' shares of ``dim`` put together, on every rank; gradients are added up, and each rank gets its share's."""
    return _Gather.apply(x, dim, group)


def reduce_scatter(x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
    """This rank's share of the sum of the ranks' tensors.

    Raises:
        ValueError: ``dim`` does not split evenly.
    """
    return _ReduceScatter.apply(x, dim, group)


def split(x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
    """This rank's share of a tensor that all ranks hold whole; the shares' gradients are put together.

    Raises:
        ValueError: ``dim`` does not split evenly.
    """
    return _Split.apply(x, dim, group)


def all_reduce(x: ms.Tensor, group: Group) -> ms.Tensor:
    """The sum of the ranks' tensors; each rank's gradient is that of the sum."""
    return _AllReduce.apply(x, group)


def sum_gradients(x: ms.Tensor, group: Group) -> ms.Tensor:
    """``x`` itself, of which every rank makes another use: their gradients are added up."""
    return _SumGradients.apply(x, group)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        return _scattered(gradient, ctx.dim, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        return _gathered(gradient, ctx.dim, ctx.group), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
        ctx.dim, ctx.group = dim, group
        share = _share(x, dim, group)
        kept = empty((*x.shape[:dim], share, *x.shape[dim + 1 :]), x.dtype)
        writable(kept).copy_(writable(x.contiguous()).narrow(dim, share * group.position, share))
        return kept

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        return _gathered(gradient, ctx.dim, ctx.group), None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: ms.Tensor, group: Group) -> ms.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        return gradient, None


class _SumGradients(Function):
    @staticmethod
    def forward(ctx: Any, x: ms.Tensor, group: Group) -> ms.Tensor:
        ctx.group = group
        return copied(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        return _summed(gradient, ctx.group), None


def _summed(x: ms.Tensor, group: Group) -> ms.Tensor:
    return collectives.all_reduce(copied(x.contiguous()), group).wait()


def _gathered(x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
    x = x.contiguous()
    rows = writable(collectives.all_gather(x, group).wait()).view(group.size, x.size)
    shape = (*x.shape[:dim], x.shape[dim] * group.size, *x.shape[dim + 1 :])
    return read_whole(rows, Slot(0, x.size), shape, dim, dtype_name(x.dtype))


def _scattered(x: ms.Tensor, dim: int, group: Group) -> ms.Tensor:
    _share(x, dim, group)
    shape = shard_shape(tuple(x.shape), dim, group.size, group.position)
    rows = empty((x.size,), x.dtype)
    slot = Slot(0, x.size // group.size)
    write_whole(writable(rows).view(group.size, slot.length), slot, x.contiguous(), dim)
    kept = empty(shape, x.dtype)
    collectives.reduce_scatter(kept, slot, rows, group).wait()
    return kept


def _share(x: ms.Tensor, dim: int, group: Group) -> int:
    size = x.shape[dim]
    if size % group.size:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not split evenly over {group.size} ranks")
    return size // group.size
