"""``core.sharding`` says what DTensor and FSDP2 really hold: every element of every shard, by its place in the whole."""

from __future__ import annotations

import math

import pytest


@pytest.mark.parametrize(
    ("mesh", "offload"),
    [
        ({"dp_shard": 4}, False),
        ({"tp": 2}, False),  # data_parallel_shard 1 goes through FSDP2 too
        ({"tp": 2, "dp_shard": 2}, False),
        ({"tp": 2, "dp_shard": 4, "ep": 2}, False),
        ({"dp_shard": 4, "ep": 4}, True),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, True),
    ],
    ids=str,
)
def test_each_rank_holds_the_elements_that_the_shard_rule_says(on_ranks, mesh, offload):
    ranks = on_ranks("tp_programs:held", _ranks(mesh), mesh=mesh, offload=offload)
    for rank, parameters in enumerate(ranks):
        for name, (here, expected) in parameters.items():
            assert here == expected, (rank, name)
    assert len(ranks[0]) == 8


def test_an_uneven_dimension_that_is_cut_twice(on_ranks):
    """11 rows over 2 tensor-parallel ranks are 6 and 5; these over 2 shards are 3 and 3, 3 and 2."""
    first_columns = [
        [row[0] for row in rank["rows"][0]] for rank in on_ranks("tp_programs:held", 4, mesh={"tp": 2, "dp_shard": 2})
    ]
    assert first_columns == [[0, 3, 6], [18, 21, 24], [9, 12, 15], [27, 30]]


def _ranks(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "ep")
