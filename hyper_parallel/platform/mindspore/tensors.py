"""Tensors as flat memory: dtypes by name, buffers, and writing into parts of them.

MindSpore 2.10 silently loses writes into views on a CPU (``narrow``, ``view`` or ``split``, then ``copy_``, ``add_`` or ``mul_``),
and casts there take a hundred times as long as elsewhere. So on a CPU memory is written through a torch tensor that lies at the same
address (DLPack). The memory belongs to MindSpore, and the alias is made for each use: ``set_data`` gives a parameter other memory, to
which an alias would not follow. On Ascend a tensor's own views are written. Both have the same methods, so what is written
here once works on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mindspore as ms
from mindspore.utils.dlpack import to_dlpack

from hyper_parallel.core.flat_buffer import Slot
from hyper_parallel.core.precision import dtype_name
from hyper_parallel.core.sharding import piece


def on_host() -> bool:
    """Whether MindSpore computes on the CPU."""
    return ms.get_context("device_target") == "CPU"


def framework_dtype(name: object) -> Any:
    """MindSpore's dtype of a framework-free name; a dtype of its own as it is."""
    return getattr(ms, dtype_name(name)) if isinstance(name, str) else name


def writable(tensor: ms.Tensor) -> Any:
    """The same memory in a form whose views can be written: a torch alias on a CPU, else ``tensor``.

    It must not be kept. Everything that is done to it happens outside autograd.
    """
    if not on_host():
        return tensor
    import torch

    return torch.utils.dlpack.from_dlpack(to_dlpack(tensor))


def empty(shape: Sequence[int], dtype: object) -> ms.Tensor:
    """A tensor of MindSpore's own memory, with undefined contents."""
    return ms.mint.empty(tuple(shape), dtype=framework_dtype(dtype))


def zeros(shape: Sequence[int], dtype: object) -> ms.Tensor:
    """A tensor of zeros."""
    made = empty(shape, dtype)
    if prod(shape):
        writable(made).zero_()
    return made


def copied(tensor: ms.Tensor, dtype: object | None = None) -> ms.Tensor:
    """A contiguous copy, cast to ``dtype``."""
    made = empty(tensor.shape, tensor.dtype if dtype is None else dtype)
    if tensor.size:
        writable(made).copy_(writable(tensor))
    return made


def added(a: ms.Tensor, b: ms.Tensor) -> ms.Tensor:
    """``a + b`` as a new tensor of ``a``'s dtype; MindSpore cannot add every dtype on a CPU."""
    made = copied(a)
    if made.size:
        writable(made).add_(writable(b))
    return made


def write_shard(buffer: Any, slot: Slot, shard: ms.Tensor) -> None:
    """Put a shard into its slot of a writable flat buffer; it may be shorter than the slot, of which the rest becomes zero."""
    target = buffer.narrow(0, slot.offset, slot.length)
    if shard.size:
        target.narrow(0, 0, shard.size).copy_(writable(shard).reshape(-1))
    if shard.size < slot.length:
        target.narrow(0, shard.size, slot.length - shard.size).zero_()


def read_shard(buffer: Any, slot: Slot, shape: Sequence[int], dtype: object) -> ms.Tensor:
    """The beginning of a slot of a writable flat buffer, as a new tensor."""
    made = empty(shape, dtype)
    if prod(shape):
        writable(made).reshape(-1).copy_(buffer.narrow(0, slot.offset, prod(shape)))
    return made


def write_whole(rows: Any, slot: Slot, whole: ms.Tensor, dim: int) -> None:
    """Cut a tensor along ``dim`` into one piece for each rank and put each into its row.

    Args:
        rows: writable, (ranks, row length).
        slot: where in a row; long enough for the largest piece. What a piece does not fill becomes zero.
    """
    _across(rows, slot, writable(whole), dim, write=True)


def read_whole(rows: Any, slot: Slot, shape: Sequence[int], dim: int, dtype: object) -> ms.Tensor:
    """The inverse of :func:`write_whole`: the tensor of ``shape`` whose pieces lie in ``rows``, as a new tensor."""
    made = empty(shape, dtype)
    if prod(shape):
        _across(rows, slot, writable(made), dim, write=False)
    return made


def _across(rows: Any, slot: Slot, whole: Any, dim: int, *, write: bool) -> None:
    """Copy between ``whole``, cut along ``dim``, and the slot in each row."""
    ranks, size = rows.shape[0], whole.shape[dim]
    for rank in range(ranks):
        start, length = piece(size, ranks, rank)
        target = rows[rank].narrow(0, slot.offset, slot.length)
        part = whole.narrow(dim, start, length)
        filled = prod(part.shape)
        if filled:
            inside = target.narrow(0, 0, filled).view(part.shape)
            inside.copy_(part) if write else part.copy_(inside)
        if write and filled < slot.length:
            target.narrow(0, filled, slot.length - filled).zero_()
