"""Tensor, sequence and pipeline parallelism on MindSpore, with sharding, on real ranks."""

from __future__ import annotations

import numpy as np
import pytest

REPORTED = {"pp": 2, "dp_shard": 2, "tp": 2}
FOUR_RANKS = [
    {"mesh": {"dp_shard": 2, "tp": 2}},
    {"mesh": {"dp_shard": 2, "tp": 2}, "sequence_parallel": True, "comm_fusion": True},
    {"mesh": {"dp_replicate": 2, "tp": 2}, "sequence_parallel": True},
    {"mesh": {"tp": 4}},
    {"mesh": {"pp": 2, "dp_shard": 2}, "micro_batches": 4, "steps": 2},
    {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "gpipe", "offload": True},
    {"mesh": {"pp": 4}, "micro_batches": 4},
    {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "interleaved_1f1b", "interleave": 2, "micro_batches": 4},
    {"mesh": {"pp": 2, "tp": 2}, "sequence_parallel": True, "schedule": "interleaved_1f1b", "interleave": 2},
    {"mesh": {"pp": 2, "dp_shard": 2, "ep": 2}, "experts": 4},
    {"mesh": {"dp_shard": 4, "ep": 2}, "experts": 4, "recompute": True},
    {"mesh": {"dp_shard": 2, "ep": 2, "tp": 2}, "experts": 2, "sequence_parallel": True},
]


TWO_RANKS = [
    {"mesh": {"dp_shard": 2}, "recompute": True, "unit": "layer"},
    {"mesh": {"dp_shard": 2}, "recompute": True, "unit": "model", "comm_fusion": True},
    {"mesh": {"dp_shard": 2}, "unit": "auto"},
    {"mesh": {"dp_shard": 2}, "experts": 4},
    {"mesh": {"dp_shard": 2, "ep": 2}, "experts": 4},
    {"mesh": {"dp_shard": 2, "ep": 2}, "experts": 64, "unit": "auto"},  # most of them without a token
    {"mesh": {"tp": 2}, "experts": 2, "sequence_parallel": True},
]


@pytest.mark.parametrize("dim", [0, 1])
def test_activations_and_their_gradients_travel_as_they_should(on_ranks, dim):
    results = on_ranks("ms_parallel_programs:activations", 2, dim=dim)
    x = np.arange(16.0).reshape(2, 4, 2)
    whole = np.concatenate([x, 2 * x], dim)
    seeds = [np.arange(whole.size).reshape(whole.shape) + 100 * r for r in range(2)]
    for rank, told in enumerate(results):
        y, gradient = told["gather"]
        assert y == whole.tolist()
        assert gradient == np.split(sum(seeds), 2, dim)[rank].tolist()
        share = np.split(3 * x, 2, dim)[rank]
        small = [np.arange(share.size).reshape(share.shape) + 100 * r for r in range(2)]
        assert told["reduce_scatter"] == (share.tolist(), np.concatenate(small, dim).tolist())
        assert told["split"] == (np.split((rank + 1) * x, 2, dim)[rank].tolist(), np.concatenate(small, dim).tolist())
        same = [x + 100 * r for r in range(2)]
        assert told["all_reduce"] == ((3 * x).tolist(), same[rank].tolist())
        assert told["sum_gradients"] == (((rank + 1) * x).tolist(), sum(same).tolist())


def right(case, results):
    """A change of all weights by one unit in the last place moves single gradient elements by up to 2e-6 of the largest."""
    assert len({told["bits"] for told in results}) == 1, case
    for rank, told in enumerate(results):
        assert told["worst"] < 5e-6, (rank, case, told["worst"])
        assert told["norm"] == pytest.approx(told["wanted norm"], rel=1e-6), (rank, case)
        assert told["loss"] == pytest.approx(told["wanted loss"], rel=1e-6), (rank, case)


@pytest.mark.parametrize("ranks, cases", [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["two", "four"])
def test_gradients_norm_and_loss_are_those_of_the_whole_model(on_ranks, ranks, cases):
    by_rank = on_ranks("ms_parallel_programs:many", ranks, cases=cases)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        right(case, results)


def test_the_reported_layout_on_eight_ranks(on_ranks):
    """issue-217: tensor parallel 2 with sequence parallel, pipeline 2, dp_shard 2; interleaved once and twice."""
    cases = [
        {"mesh": REPORTED, "sequence_parallel": True},
        {"mesh": REPORTED, "sequence_parallel": True, "schedule": "interleaved_1f1b", "interleave": 2},
    ]
    for case, results in zip(cases, zip(*on_ranks("ms_parallel_programs:many", 8, cases=cases), strict=True), strict=True):
        right(case, results)
        assert all(told["reduced over"] == [1, 2] for told in results)


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({"reduce_dtype": None}, "bfloat16"),
        ({"reduce_dtype": None, "schedule": "interleaved_1f1b", "interleave": 2}, "bfloat16"),
        ({"reduce_dtype": "float32"}, "float32"),
    ],
    ids=["native", "native interleaved", "float32"],
)
def test_the_reported_configuration_reduces_in_one_dtype_from_layout_to_buffer(on_ranks, options, dtype):
    results = on_ranks(
        "ms_parallel_programs:language_model", 8, mesh=REPORTED, sequence_parallel=True, bfloat16=True, **options
    )
    assert len({told["bits"] for told in results}) == 1
    for told in results:
        assert told["dtypes"] == [dtype]
        assert told["norm"] == pytest.approx(told["wanted norm"], rel=2e-2)
        assert told["loss"] == pytest.approx(told["wanted loss"], rel=2e-2)


def test_the_reported_fault_comes_back_through_the_reported_call_path(on_ranks):
    case = {"mesh": REPORTED, "sequence_parallel": True, "bfloat16": True, "reduce_dtype": None, "fault": True}
    path = [
        "_exec_step",
        "_exec_fsdp_reduce_grad",
        "execute_reduce_grad",
        "post_backward",
        "_issue_reduce_scatter_for_current_module",
        "reduce_scatter_grad",
    ]
    for told in on_ranks("ms_parallel_programs:language_model", 8, **case):
        assert told["error"] == "output_buffer dtype mismatch: expected BFloat16, got Float32"
        assert [name for name in told["frames"] if name in path] == path


def test_offload_changes_no_bit(on_ranks):
    case = {"mesh": {"pp": 2, "dp_shard": 2}, "micro_batches": 4}
    by_rank = on_ranks("ms_parallel_programs:many", 4, cases=[case, case | {"offload": True}])
    for plain, offloaded in by_rank:
        assert plain["clipped"] == offloaded["clipped"] and plain["bits"] == offloaded["bits"]
