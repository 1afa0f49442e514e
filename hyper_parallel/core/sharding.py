"""The one shard rule: which part of a tensor dimension a rank holds.

It is the rule of ``torch.chunk``: every rank but the last few holds ``ceil(size / ranks)`` elements, then comes at
most one shorter piece, then empty ones. Buffers pad each piece to the full chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from hyper_parallel.core.plan import ParallelPlan, matching

if TYPE_CHECKING:
    from hyper_parallel.core.mesh import ParallelMesh  # which checks sizes by the rule here


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


class Cut(NamedTuple):
    """One division of a tensor: dimension ``dim`` over ``ranks`` ranks, of which this one is number ``position``."""

    dim: int
    ranks: int
    position: int


def local_pieces(shape: tuple[int, ...], cuts: Iterable[Cut]) -> tuple[Piece, ...]:
    """What a rank holds of a tensor after all ``cuts`` in their order: the range of each dimension, counted in the whole tensor.

    Each cut divides what the ones before it left, so a dimension may be cut twice: tensor parallelism first, then FSDP.
    """
    held = [Piece(0, size) for size in shape]
    for cut in cuts:
        start, length = held[cut.dim]
        part = piece(length, cut.ranks, cut.position)
        held[cut.dim] = Piece(start + part.start, part.length)
    return tuple(held)


def parameter_cuts(plan: ParallelPlan, mesh: ParallelMesh, name: str, rank: int) -> list[Cut]:
    """How the parameter ``name`` is cut on ``rank``: by expert parallelism, then tensor parallelism, then FSDP."""
    position = mesh.coordinates(rank)
    tensor_dim = plan.tensor_dim(name)
    tensor = [] if tensor_dim is None else [Cut(tensor_dim, mesh.tp, position["tp"])]
    if not plan.is_expert(name):
        return [*tensor, Cut(0, mesh.dp_shard, position["dp_shard"])]
    shards, ep = divmod(position["dp_shard"], mesh.ep)
    shard_dim = matching(plan.expert_shard_dims, name) or 0
    return [Cut(0, mesh.ep, ep), *tensor, Cut(shard_dim, mesh.dp_shard // mesh.ep, shards)]


class ShardSizes(NamedTuple):
    """Elements of one parameter on one rank: of its own piece, of the padded shard that buffers hold, and of the parameter once it
    is gathered, which tensor and expert parallelism leave cut."""

    held: int
    shard: int
    unsharded: int


def shard_sizes(shape: tuple[int, ...], cuts: Sequence[Cut]) -> ShardSizes:
    """What remains of a parameter after ``cuts``, of which the last one is FSDP's (see :func:`parameter_cuts`)."""
    *before, sharding = cuts
    lengths = [part.length for part in local_pieces(shape, before)]
    size = lengths.pop(sharding.dim)
    rest = prod(lengths)
    held = piece(size, sharding.ranks, sharding.position).length
    return ShardSizes(rest * held, rest * chunk_size(size, sharding.ranks), rest * size)
