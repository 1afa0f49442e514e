"""The layout of a fused buffer: many tensors of one dtype in one allocation, moved by one collective.

Offsets, sizes and totals are counted in elements, and the dtype in which they are counted is part of the layout. Whoever allocates
the buffer, writes into it, reduces it or checks it takes the dtype from here, so that no two of them can disagree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hyper_parallel.core.precision import ITEM_SIZES, resolve_reduce_dtype

COMMUNICATION_ALIGNMENT = 512
"""Bytes. HCCL moves data whose address is a multiple of it without a copy of its own; the other backends ask for less."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class Slot(NamedTuple):
    """Where one tensor lies, in elements: ``[offset, offset + length)``."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first element behind it."""
        return self.offset + self.length


@dataclass(frozen=True)
class FlatLayout:
    """Slots in one flat buffer. What no slot covers is padding, and is zero.

    Attributes:
        dtype: the framework-free name of the dtype of the whole buffer.
        slots: one for each tensor, in their order, ascending and without overlap.
        total: elements of the buffer, padding included.
    """

    dtype: str
    slots: tuple[Slot, ...]
    total: int

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.total * self.item_size

    @property
    def padding(self) -> tuple[Slot, ...]:
        """The ranges that belong to no tensor, ascending; empty ones are left out."""
        starts = (0, *(slot.end for slot in self.slots))
        ends = (*(slot.offset for slot in self.slots), self.total)
        return tuple(Slot(start, end - start) for start, end in zip(starts, ends, strict=True) if end > start)


def aligned_layout(
    lengths: Sequence[int],
    reduce_dtype: object | None,
    native_dtype: object,
    alignment_bytes: int = COMMUNICATION_ALIGNMENT,
) -> FlatLayout:
    """Lay out tensors of ``lengths`` elements one after another, each beginning at a multiple of ``alignment_bytes``.

    The dtype of the layout is what :func:`~hyper_parallel.core.precision.resolve_reduce_dtype` says, never an allocator's default.

    Args:
        lengths: elements of each tensor; 0 is an empty shard and takes no room.
        reduce_dtype: the dtype of the reduction; ``None`` is ``native_dtype``.
        native_dtype: the dtype of the gradients before the reduction.
        alignment_bytes: a multiple of the item size. The total is aligned too, so that buffers can follow one another.

    Raises:
        ValueError: a negative length, or an alignment that is no multiple of the item size.
    """
    dtype = resolve_reduce_dtype(reduce_dtype, native_dtype)
    item_size = ITEM_SIZES[dtype]
    if alignment_bytes < 1 or alignment_bytes % item_size:
        raise ValueError(f"an alignment of {alignment_bytes} bytes is no multiple of {dtype}'s {item_size} bytes")
    step = alignment_bytes // item_size
    slots = []
    end = 0
    for length in lengths:
        if length < 0:
            raise ValueError(f"a tensor of {length} elements cannot be laid out")
        slots.append(Slot(end, length))
        end += -(-length // step) * step
    return FlatLayout(dtype, tuple(slots), end)


def packed_layout(lengths: Sequence[int], dtype: object) -> FlatLayout:
    """Lay out tensors of ``lengths`` elements of ``dtype`` one after another, without padding."""
    return aligned_layout(lengths, None, dtype, ITEM_SIZES[resolve_reduce_dtype(None, dtype)])


def check_buffer(layout: FlatLayout, dtype: object, elements: int) -> None:
    """The one check of a buffer against its layout, for every platform.

    Raises:
        ValueError: another dtype, or another number of elements.
    """
    found = resolve_reduce_dtype(None, dtype)
    if found != layout.dtype:
        raise ValueError(f"a fused buffer of {found} was given to a layout of {layout.dtype}")
    if elements != layout.total:
        raise ValueError(f"a fused buffer of {elements} elements was given to a layout of {layout.total}")


def split_by(items: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Group ``items`` by key, in the order of their first appearance: tensors of different dtypes, or with different ranks to
    reduce over, each get a buffer of their own instead of being refused."""
    groups: dict[Key, list[Item]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups
