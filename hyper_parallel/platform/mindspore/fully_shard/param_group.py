"""Gradients that are reduced together: one fused buffer, in one dtype, over one set of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms

from hyper_parallel.core.flat_buffer import (
    COMMUNICATION_ALIGNMENT,
    FlatLayout,
    Slot,
    aligned_layout,
    check_buffer,
    split_by,
)
from hyper_parallel.core.precision import resolve_reduce_dtype
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.collectives import Group, Pending
from hyper_parallel.platform.mindspore.fully_shard.param import ShardedParam
from hyper_parallel.platform.mindspore.tensors import empty, writable


class AllReduceParamGroup:
    """Sharded parameters whose gradients, once each rank has its shard of them, are added up over the same further ranks.

    Those are the replicas (HSDP) and, for gradients of which each tensor-parallel rank computed a part, the tensor-parallel ranks.
    Where there is neither, the group is this rank alone and everything else is the same.

    Args:
        params: at least one, all of one gradient dtype.
        group: the further ranks.
        reduce_dtype: of the reduction; None is ``native_dtype``.
        native_dtype: of the gradients before the reduction.
    """

    def __init__(
        self, params: Sequence[ShardedParam], group: Group, reduce_dtype: object | None, native_dtype: object
    ) -> None:
        self.params = tuple(params)
        self.group = group
        # the dtype of layout and buffer alike; left as None, an allocator would make it float32 (issue 217)
        self.reduce_dtype = resolve_reduce_dtype(reduce_dtype, native_dtype)
        self.layout = self.compute_aligned_layout()
        self.buffer: ms.Tensor | None = None

    def compute_aligned_layout(self) -> FlatLayout:
        """Where each parameter's shard lies in the fused buffer."""
        lengths = [param.slot_length for param in self.params]
        return aligned_layout(lengths, self.reduce_dtype, self.reduce_dtype, COMMUNICATION_ALIGNMENT)

    def allocate_fused_buffer(self) -> ms.Tensor:
        """A new fused buffer, flat, of the layout's dtype and size; its padding is zero."""
        buffer = empty((self.layout.total,), self.layout.dtype)
        check_buffer(self.layout, buffer.dtype, buffer.size)
        flat = writable(buffer)
        for gap in self.layout.padding:
            flat.narrow(0, gap.offset, gap.length).zero_()
        return buffer

    def start_reduce_scatter(self, *, comm_fusion: bool) -> list[Pending]:
        """Start summing the accumulated gradients over the shard group into a new fused buffer.

        Args:
            comm_fusion: one reduce-scatter for all parameters; else one each, so that the first can start early.
        """
        self.buffer = self.allocate_fused_buffer()
        if not comm_fusion:
            pairs = zip(self.params, self._slots(), strict=True)
            return [param.reduce_scatter_grad(self.buffer, slot) for param, slot in pairs]
        ranks = self.params[0].shard_group.size
        rows = empty((ranks * self.layout.total,), self.layout.dtype)
        by_rank = writable(rows).view(ranks, self.layout.total)
        for gap in self.layout.padding:
            by_rank.narrow(1, gap.offset, gap.length).zero_()
        for param, slot in zip(self.params, self._slots(), strict=True):
            param.write_gradient(by_rank, slot)
        return [collectives.reduce_scatter(self.buffer, Slot(0, self.layout.total), rows, self.params[0].shard_group)]

    def start_all_reduce(self) -> Pending:
        """Start summing the fused buffer over the further ranks."""
        assert self.buffer is not None, "the reduce-scatter has not been started"
        return collectives.all_reduce(self.buffer, self.group)

    def apply(self) -> dict[int, ms.Tensor]:
        """Hand each parameter its part of the reduced buffer, and free it. By the parameter's id, what it got."""
        buffer, self.buffer = self.buffer, None
        assert buffer is not None, "nothing was reduced"
        pairs = zip(self.params, self._slots(), strict=True)
        return {id(param): param.apply_reduced_grad(buffer, slot) for param, slot in pairs}

    def _slots(self) -> tuple[Slot, ...]:
        return self.layout.slots


def group_params(
    params: Sequence[ShardedParam], further_ranks: Sequence[Group], reduce_dtype: object | None
) -> list[AllReduceParamGroup]:
    """Split ``params`` into groups of one gradient dtype and one set of further ranks, in the order of their first member."""
    by_key = split_by(
        ((group.ranks, param.compute_dtype), (param, group)) for param, group in zip(params, further_ranks, strict=True)
    )
    return [
        AllReduceParamGroup([param for param, _ in members], members[0][1], reduce_dtype, native_dtype)
        for (_, native_dtype), members in by_key.items()
    ]
