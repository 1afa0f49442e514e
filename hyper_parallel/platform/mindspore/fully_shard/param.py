"""One sharded parameter: its shard, how it becomes whole, and how its whole gradient becomes a shard's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms

from hyper_parallel.core.flat_buffer import Slot
from hyper_parallel.core.precision import dtype_name, resolve_reduce_dtype
from hyper_parallel.core.sharding import chunk_size, piece
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.collectives import Group, Pending
from hyper_parallel.platform.mindspore.layout import note_place, note_tensor_cut, place, tensor_cut
from hyper_parallel.platform.mindspore.offload import to_host
from hyper_parallel.platform.mindspore.tensors import (
    added,
    copied,
    empty,
    framework_dtype,
    read_shard,
    writable,
    write_whole,
)


class Attribute(NamedTuple):
    """Where a cell refers to a parameter; a tied one is referred to from several places."""

    cell: ms.nn.Cell
    name: str


class ShardedParam:
    """A parameter of which each rank of ``shard_group`` holds a shard.

    Args:
        whole: the parameter before sharding: the same values on every rank of the group.
        attributes: all cells' attributes that are this parameter.
        dim: the dimension to cut.
        shard_group: the ranks to cut it over.
        compute_dtype: of the whole parameter in forward and backward, and so of its gradient; None is the parameter's own.
        reduce_dtype: of accumulation and reduction; None is the gradient's own, as the one rule in ``core.precision`` says.
        shard_dtype: of the shard and its gradient.
        storage_dtype: what the values are rounded to at first.
        offload: the shard and its gradient stay in host memory.
    """

    def __init__(
        self,
        whole: ms.Parameter,
        attributes: Sequence[Attribute],
        dim: int,
        shard_group: Group,
        *,
        compute_dtype: object | None,
        reduce_dtype: object | None,
        shard_dtype: object | None,
        storage_dtype: object | None,
        offload: bool,
    ) -> None:
        self.name = whole.name
        self.attributes = tuple(attributes)
        self.dim = dim
        self.shard_group = shard_group
        self.offload = offload
        self.whole_shape = tuple(whole.shape)
        own = dtype_name(whole.dtype)
        self.compute_dtype = dtype_name(compute_dtype or own)
        self.reduce_dtype = resolve_reduce_dtype(reduce_dtype, self.compute_dtype)
        self.shard_dtype = dtype_name(shard_dtype or own)
        self.cut_shape = self.whole_shape or (1,)  # a 0-dim parameter is stored as one element
        self.shard = self._make_shard(whole, storage_dtype)
        self.accumulated: ms.Tensor | None = None

    def _make_shard(self, whole: ms.Parameter, storage_dtype: object | None) -> ms.Parameter:
        start, length = piece(self.cut_shape[self.dim], self.shard_group.size, self.shard_group.position)
        source = writable(copied(whole, storage_dtype)).reshape(self.cut_shape)
        shape = (*self.cut_shape[: self.dim], length, *self.cut_shape[self.dim + 1 :])
        values = empty(shape, self.shard_dtype)
        if values.size:
            writable(values).copy_(source.narrow(self.dim, start, length))
        # a parameter of its own: MindSpore 2.10 checks gradients against the shape that a parameter was made with
        shard = ms.Parameter(to_host(values) if self.offload else values, name=self.name, requires_grad=whole.requires_grad)
        note_tensor_cut(shard, tensor_cut(whole))
        for cell, name in self.attributes:
            cell._params[name] = shard
        return shard

    @property
    def trains(self) -> bool:
        """Whether it gets a gradient; may be switched at any time, as on any parameter."""
        return bool(self.shard.requires_grad)

    @property
    def slot_length(self) -> int:
        """Elements of the largest shard of any rank, to which the others are padded."""
        inner = 1
        for dim, size in enumerate(self.cut_shape):
            inner *= chunk_size(size, self.shard_group.size) if dim == self.dim else size
        return inner

    def check_gradient(self, gradient: ms.Tensor) -> None:
        """
        Raises:
            ValueError: not the gradient of the whole parameter. (Broadcast, it would give numbers.)
        """
        if tuple(gradient.shape) != self.whole_shape:
            raise ValueError(f"{self.name}: a gradient of shape {tuple(gradient.shape)} for a parameter of {self.whole_shape}")

    def accumulate(self, gradient: ms.Tensor) -> None:
        """Add a micro-batch's gradient of the whole parameter to the earlier ones, in ``reduce_dtype``."""
        self.check_gradient(gradient)
        if self.accumulated is None:
            # copied in any case: autograd may give one tensor to two parameters
            self.accumulated = copied(gradient.contiguous(), self.reduce_dtype)
        elif gradient.size:
            writable(self.accumulated).add_(writable(copied(gradient.contiguous(), self.reduce_dtype)))

    def reduce_scatter_grad(self, output_buffer: ms.Tensor, slot: Slot) -> Pending:
        """Start adding up the ranks' accumulated gradients; this rank's shard of the sum goes into ``slot`` of ``output_buffer``.

        A parameter that had no part in this rank's computation counts as zeros here, since others may have used it.

        Raises:
            ValueError: the buffer is of another dtype than the reduction.
        """
        wanted = framework_dtype(self.reduce_dtype)
        if output_buffer.dtype != wanted:
            raise ValueError(f"output_buffer dtype mismatch: expected {wanted}, got {output_buffer.dtype}")
        rows = empty((self.shard_group.size * slot.length,), self.reduce_dtype)
        self.write_gradient(writable(rows).view(self.shard_group.size, slot.length), Slot(0, slot.length))
        return collectives.reduce_scatter(output_buffer, slot, rows, self.shard_group)

    def write_gradient(self, rows: Any, slot: Slot) -> None:
        """Put each rank's part of the accumulated gradient into its row of the writable ``rows``, and forget the gradient."""
        gradient, self.accumulated = self.accumulated, None
        if gradient is not None:
            write_whole(rows, slot, gradient.reshape(self.cut_shape), self.dim)
        elif slot.length:
            rows.narrow(1, slot.offset, slot.length).zero_()

    def apply_reduced_grad(self, buffer: ms.Tensor, slot: Slot) -> ms.Tensor:
        """Add this rank's part of the reduced gradient to the shard's ``grad``, cast to the shard's dtype; return the part."""
        reduced = read_shard(writable(buffer), slot, self.shard.shape, self.shard_dtype)
        if self.offload:
            reduced = to_host(reduced)
        before = getattr(self.shard, "grad", None)
        gradient = reduced if before is None else added(before, reduced)
        where = place(self.shard)
        if where is not None:
            note_place(gradient, where)
        self.shard.grad = gradient
        return reduced
