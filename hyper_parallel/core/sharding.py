"""The one shard rule: which part of a tensor dimension a rank holds.

It is the rule of ``torch.chunk``: every rank but the last few holds ``ceil(size / ranks)`` elements, then comes at
most one shorter piece, then empty ones. Buffers pad each piece to the full chunk.
"""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """A contiguous range of one tensor dimension: ``[start, start + length)``."""

    start: int
    length: int


def chunk_size(size: int, ranks: int) -> int:
    """Elements of a full chunk of a dimension of ``size`` elements over ``ranks`` ranks; also the padded length."""
    return -(-size // ranks)


def piece(size: int, ranks: int, index: int) -> Piece:
    """The part of a dimension of ``size`` elements that rank ``index`` of ``ranks`` holds; possibly empty."""
    chunk = chunk_size(size, ranks)
    start = min(index * chunk, size)
    return Piece(start, min(start + chunk, size) - start)


def shard_shape(shape: tuple[int, ...], dim: int, ranks: int, index: int) -> tuple[int, ...]:
    """The shape that rank ``index`` of ``ranks`` holds of a tensor of ``shape`` sharded on dimension ``dim``."""
    return (*shape[:dim], piece(shape[dim], ranks, index).length, *shape[dim + 1 :])
