"""The one shard rule, that of ``torch.chunk``. tests/dist pins it to FSDP2's real shards."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.core.sharding import chunk_size, piece, shard_shape


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
