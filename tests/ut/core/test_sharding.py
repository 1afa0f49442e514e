"""The one shard rule, that of ``torch.chunk``. tests/dist/platform/torch/test_shards.py pins it to what FSDP2 really holds."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.sharding import Cut, chunk_size, local_pieces, parameter_cuts, piece, shard_shape


@pytest.mark.parametrize(
    ("size", "ranks", "pieces"),
    [
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (7, 4, [(0, 2), (2, 2), (4, 2), (6, 1)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (3, 4, [(0, 1), (1, 1), (2, 1), (3, 0)]),
        (1, 3, [(0, 1), (1, 0), (1, 0)]),
        (0, 2, [(0, 0), (0, 0)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_full_chunks_then_at_most_one_shorter_then_empty_ones(size, ranks, pieces):
    assert [piece(size, ranks, index) for index in range(ranks)] == pieces


def test_it_is_the_rule_of_torch_chunk_for_all_small_sizes():
    for size in range(1, 40):
        for ranks in range(1, 12):
            lengths = [len(part) for part in torch.arange(size).chunk(ranks)]
            lengths += [0] * (ranks - len(lengths))
            ours = [piece(size, ranks, index) for index in range(ranks)]
            assert [part.length for part in ours] == lengths, (size, ranks)
            assert sum(part.length for part in ours) == size
            assert all(part.length <= chunk_size(size, ranks) for part in ours)


def test_only_the_sharded_dimension_changes():
    assert shard_shape((5, 6, 7), 0, 4, 2) == (1, 6, 7)
    assert shard_shape((5, 6, 7), 1, 4, 0) == (5, 2, 7)
    assert shard_shape((5, 6, 7), 2, 2, 1) == (5, 6, 3)
    assert shard_shape((3, 2), 0, 4, 3) == (0, 2)


def test_a_cut_divides_what_the_cuts_before_it_left():
    assert local_pieces((7, 5), []) == ((0, 7), (0, 5))
    assert local_pieces((7, 5), [Cut(0, 2, 1)]) == ((4, 3), (0, 5))
    assert local_pieces((7, 5), [Cut(0, 2, 1), Cut(0, 2, 0)]) == ((4, 2), (0, 5))
    assert local_pieces((7, 5), [Cut(0, 2, 1), Cut(0, 2, 1)]) == ((6, 1), (0, 5))
    assert local_pieces((7, 5), [Cut(1, 2, 1), Cut(0, 4, 3)]) == ((6, 1), (3, 2))
    assert local_pieces((7, 5), [Cut(0, 2, 1), Cut(0, 4, 3)]) == ((7, 0), (0, 5))  # 3 over 4: 1, 1, 1 and none


PLAN = ParallelPlan(
    layers=(),
    tensor_split={"*.up": 0, "*.down": 1, "experts.inner": 1},
    experts=("experts",),
    expert_shard_dims={"experts.inner": 2},
)


@pytest.mark.parametrize(
    ("name", "rank", "cuts"),
    [
        ("ffn.up", 0, [Cut(0, 2, 0), Cut(0, 4, 0)]),
        ("ffn.up", 7, [Cut(0, 2, 1), Cut(0, 4, 3)]),  # rank 7 is the last of tp and of dp_shard
        ("ffn.down", 3, [Cut(1, 2, 1), Cut(0, 4, 1)]),
        ("norm", 3, [Cut(0, 4, 1)]),
        ("experts.inner", 0, [Cut(0, 2, 0), Cut(1, 2, 0), Cut(2, 2, 0)]),
        ("experts.inner", 3, [Cut(0, 2, 1), Cut(1, 2, 1), Cut(2, 2, 0)]),  # ep is the inner part of dp_shard
        ("experts.inner", 4, [Cut(0, 2, 0), Cut(1, 2, 0), Cut(2, 2, 1)]),
        ("experts.bias", 4, [Cut(0, 2, 0), Cut(0, 2, 1)]),
        ("ffn.up", 8 + 7, [Cut(0, 2, 1), Cut(0, 4, 3)]),  # a replica holds the same
    ],
)
def test_expert_then_tensor_parallelism_then_fsdp(name, rank, cuts):
    mesh = ParallelMesh(dp_replicate=2, dp_shard=4, ep=2, tp=2)
    assert parameter_cuts(PLAN, mesh, name, rank) == cuts


@pytest.mark.parametrize("name", ["ffn.up", "ffn.down", "norm", "experts.inner", "experts.bias"])
@pytest.mark.parametrize("shape", [(8, 8, 8), (7, 6, 5), (3, 2, 1)])
def test_the_ranks_of_one_replica_hold_every_element_once(name, shape):
    mesh = ParallelMesh(dp_replicate=2, dp_shard=4, ep=2, tp=2)
    held = torch.zeros(shape, dtype=torch.int64)
    for rank in range(8):
        pieces = local_pieces(shape, parameter_cuts(PLAN, mesh, name, rank))
        held[tuple(slice(start, start + length) for start, length in pieces)] += 1
    copies = 1 if PLAN.tensor_dim(name) is not None else 2  # what is not cut, both tensor-parallel ranks hold
    assert (held == copies).all()
