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


HSDP = {"dp_replicate": 2, "dp_shard": 2}
CASES = [
    {},
    {"units": "several"},
    {"units": "one"},
    {"kind": "odd"},
    {"kind": "odd", "value_and_grad": True},
    {"kind": "odd", "reshard_after_forward": False, "comm_fusion": True},
    {"kind": "odd", "units": "several", "offload": True},
    {"kind": "odd", "mesh": HSDP},
    {"kind": "odd", "mesh": HSDP, "comm_fusion": True},
    {"kind": "odd", "mesh": {"dp_replicate": 4}},
    {"kind": "odd", "micro_batches": 4, "steps": 2},
    {"kind": "odd", "micro_batches": 2, "mesh": HSDP},
]


def test_gradients_are_those_of_the_whole_model(on_ranks):
    for rank, told in enumerate(on_ranks("ms_programs:many", 4, function="sharded_gradients", cases=CASES)):
        for case, result in zip(CASES, told, strict=True):
            assert result["worst"] < 1e-6, (rank, case)
            assert result["held"] == 0, (rank, case)


@pytest.mark.parametrize("reshard, after_forward, gathers", [(True, 0, 6), (False, 5, 3)])
def test_whole_parameters_are_freed_between_forward_and_backward(on_ranks, reshard, after_forward, gathers):
    """Three units of 2, 2 and 1 parameters: gathered once for forward, and again for backward where they were freed."""
    for told in on_ranks("ms_programs:life_of_whole_parameters", 2, reshard_after_forward=reshard):
        assert told == {
            "after forward": after_forward,
            "at the end": 0,
            "all_gather": gathers,
            "reduce_scatter": 3,
        }


@pytest.mark.parametrize(
    "reduce_dtype, expected", [("float32", 2 + 2 * 2**-10), (None, 2.0)], ids=["float32", "native"]
)
@pytest.mark.parametrize("options", [{}, {"comm_fusion": True}, {"mesh": HSDP}, {"mesh": {"dp_shard": 2, "tp": 2}}], ids=str)
def test_gradients_are_reduced_in_the_dtype_that_was_asked_for(on_ranks, reduce_dtype, expected, options):
    """1, 2**-10, 1 and 2**-10 add up to 2.001953125, of which bfloat16 keeps 2."""
    resolved, item_size = ("float32", 4) if reduce_dtype else ("bfloat16", 2)
    for told in on_ranks("ms_programs:low_precision", 4, reduce_dtype=reduce_dtype, **options):
        assert told["values"] == [expected]
        assert told["dtype"] == "Float32"
        assert told["buffer"].lower() == resolved
        dtype, slots, total = told["layout"]
        assert dtype == resolved
        assert total * item_size == 512 and slots[0][0] == 0


@pytest.mark.parametrize("reduce_dtype, expected", [("float32", 258.0), (None, 256.0)], ids=["float32", "native"])
def test_micro_batches_accumulate_in_the_dtype_of_the_reduction(on_ranks, reduce_dtype, expected):
    """256 + 1 + 1: bfloat16 loses both ones."""
    for told in on_ranks("ms_programs:low_precision", 2, reduce_dtype=reduce_dtype, micro_batches=3):
        assert told["values"] == [expected]


def test_the_reported_fault_gives_the_reported_error_where_it_was_reported(on_ranks):
    for told in on_ranks("ms_programs:reported_fault", 4):
        assert told["message"] == "output_buffer dtype mismatch: expected BFloat16, got Float32"
        path = ["post_backward", "_issue_reduce_scatter_for_current_module", "reduce_scatter_grad"]
        assert [name for name in told["frames"] if name in path] == path


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_training_takes_the_steps_of_the_whole_model(on_ranks, offload):
    for told in on_ranks("ms_programs:trained", 4, steps=4, offload=offload, mesh=HSDP):
        assert told["losses"] == pytest.approx(told["whole"], rel=1e-5)
        assert told["losses"][-1] < told["losses"][0]
        assert told["worst"] < 1e-5
