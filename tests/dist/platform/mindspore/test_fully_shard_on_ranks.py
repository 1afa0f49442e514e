"""Sharded MindSpore cells on real ranks: the gradients of a whole cell, element by element."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_collectives_move_what_they_say(on_ranks, dtype):
    for rank, told in enumerate(on_ranks("ms_programs:collectives_by_hand", 4, dtype=dtype)):
        assert told["all_reduce"] == [0 + 1 + 2 + 3, 4]
        assert told["max"] == [3, 0]
        assert told["all_gather"] == [0, 0, 1, 10, 2, 20, 3, 30]
        assert told["reduce_scatter"] == [0, 40 * rank + 6, 40 * rank + 6, 0]
        assert told["all_to_all"] == [10.0 * source + rank for source in range(4) for _ in range(rank + 1)]
        assert told["broadcast"] == [6]
        assert told["ring"] == [(rank - 1) % 4]
        assert told["pair"] == [[1, 1, 5, 5][rank]]
        assert told["numbers"] == [[r + 2**-40] for r in range(4)]
        assert told["objects"] == [{"rank": r} for r in range(4)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"units": "several"},
        {"units": "one"},
        {"kind": "odd"},
        {"kind": "odd", "reshard_after_forward": False, "comm_fusion": True},
        {"kind": "odd", "units": "several", "offload": True},
        {"kind": "odd", "mesh": {"dp_replicate": 2, "dp_shard": 2}},
        {"kind": "odd", "mesh": {"dp_replicate": 2, "dp_shard": 2}, "comm_fusion": True},
        {"kind": "odd", "mesh": {"dp_replicate": 4}},
        {"kind": "odd", "micro_batches": 4, "steps": 2},
        {"kind": "odd", "micro_batches": 2, "mesh": {"dp_replicate": 2, "dp_shard": 2}},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_whole_model(on_ranks, options):
    for told in on_ranks("ms_programs:sharded_gradients", 4, **options):
        assert told["worst"] < 1e-6
        assert told["held"] == 0
