"""The gradient norm of MindSpore parameters on real ranks, by numbers that can be added up by hand."""

from __future__ import annotations

import math

import pytest

FSDP, HSDP, TP = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}
ELEVEN = math.sqrt(sum(n * n for n in range(1, 12)))  # 1 ... 11: 506


NORMS = [(2.0, ELEVEN), (1, 66.0), ("inf", 11.0), ("-inf", 1.0), (0, 11.0), (3, 4356 ** (1 / 3))]


@pytest.mark.parametrize("mesh", [FSDP, HSDP], ids=str)
def test_each_element_counts_once(on_ranks, mesh):
    """Shapes (3, 2) and (5,): over four ranks uneven, and the last one holds nothing."""
    cases = [{"shapes": [[3, 2], [5]], "mesh": mesh, "norm_type": norm_type} for norm_type, _ in NORMS]
    by_rank = on_ranks("ms_norm_programs:many", 4, cases=cases)
    for (norm_type, expected), results in zip(NORMS, zip(*by_rank, strict=True), strict=True):
        assert {told["bits"] for told in results} == {results[0]["bits"]}
        for told in results:
            assert told["norm"] == pytest.approx(expected, rel=1e-7), norm_type
            assert told["ranks"] == [0, 1, 2, 3]
            assert told["dtype"] == "Float32"
    for told in next(zip(*by_rank, strict=True)):
        assert told["after"] == pytest.approx(1.0, rel=1e-6)
    held = [n for told in by_rank for values in told[0]["clipped"] for n in values]
    assert max(held) == pytest.approx(11 / (ELEVEN + 1e-6))


def test_the_norm_tells_its_parts(on_ranks):
    for told in on_ranks("ms_norm_programs:parts", 4):
        assert told["classes"] == [("sharded", False, pytest.approx(ELEVEN, rel=1e-7), 11, (0, 1))]
        assert told["parameters"] == [
            ("weight0", False, pytest.approx(91**0.5, rel=1e-7), 6, (0, 1)),
            ("weight1", False, pytest.approx(415**0.5, rel=1e-7), 5, (0, 1)),
        ]


@pytest.mark.parametrize(
    "tensor, expected",
    [
        ("partial", 2 * ELEVEN),  # each of two ranks has the same part: the gradient is twice as large, and counts once
        ("cut", math.sqrt(2) * ELEVEN),  # two different pieces that happen to have the same gradients
        ("", ELEVEN),  # whole and complete on both
    ],
)
def test_tensor_parallel_ranks_count_pieces_and_not_copies(on_ranks, tensor, expected):
    for told in on_ranks("ms_norm_programs:measured", 4, shapes=[[3, 2], [5]], mesh=TP, tensor=tensor):
        assert told["norm"] == pytest.approx(expected, rel=1e-7)
        assert told["replicas_differ"] == ()


def test_offload_changes_no_bit(on_ranks):
    plain, offloaded = (
        on_ranks("ms_norm_programs:measured", 2, shapes=[[3, 2], [5]], mesh={"dp_shard": 2}, offload=offload)
        for offload in (False, True)
    )
    assert plain == offloaded


def test_stages_of_a_pipeline_are_one_model(on_ranks):
    for rank, told in enumerate(on_ranks("ms_norm_programs:over_a_pipeline", 4)):
        assert told["both"] == pytest.approx(math.sqrt(14 + 30), rel=1e-7)
        assert told["first"] == told["empty list on the second"] == pytest.approx(math.sqrt(14), rel=1e-7)
        assert told["own"] == pytest.approx(math.sqrt(14) if rank < 2 else 0.0, rel=1e-7)


def test_a_parameter_tied_across_stages_counts_once(on_ranks):
    for told in on_ranks("ms_norm_programs:tied_across_stages", 4):
        assert "finish_gradients" in told["before"]
        assert told["gradients"] in ([[2, 4]], [[6, 8]])
        assert told["norm"] == pytest.approx(2 * math.sqrt(30), rel=1e-7)


def test_ranks_that_disagree_hear_the_same(on_ranks):
    assert set(on_ranks("ms_norm_programs:wrong_on_some_ranks", 4, what="nan")) == {
        (
            "NonFiniteNormError",
            "the gradient norm of order 2 is nan; gradients that are not finite: rank 3: weight1. Nothing was clipped.",
        )
    }
    (told,) = set(on_ranks("ms_norm_programs:wrong_on_some_ranks", 4, what="list"))
    assert told[0] == "GradientMismatchError"
    assert told[1].startswith("rank 3 lists other parameters than the others. First difference at index 1: rank 0 has (6,) cut")
    (told,) = set(on_ranks("ms_norm_programs:wrong_on_some_ranks", 4, what="integers"))
    assert told == ("ValueError", "rank 3: the gradient of index 1 is Int32; a norm needs float64, float32, bfloat16 or float16")
    missing = on_ranks("ms_norm_programs:wrong_on_some_ranks", 4, what="missing")
    assert missing == [pytest.approx(math.sqrt(sum(n * n for n in range(1, 11))), rel=1e-7)] * 4
    assert on_ranks("ms_norm_programs:wrong_on_some_ranks", 4, what="differs") == [((1, 3),)] * 4


def test_gradients_are_found_where_they_are(on_ranks):
    for told in on_ranks("ms_norm_programs:ways_to_hold_a_gradient", 2):
        assert told["once"] == told["generator"] == told["twice listed"] == pytest.approx(ELEVEN, rel=1e-7)
        assert told["accumulated"] == pytest.approx(2 * ELEVEN, rel=1e-7)
        assert told["main_grad"] == pytest.approx(ELEVEN, rel=1e-7)
        assert told["scaled by half"] == pytest.approx(ELEVEN / 2, rel=1e-6)
        assert told["none"] == 0.0
