"""The reduce dtype, seen through the real reducer: a tolerance alone cannot tell bfloat16 from float32."""

from __future__ import annotations

import pytest

SMALL = 2.0**-10  # 1 + 2^-10 is a float32 and no bfloat16
FSDP = {"dp_shard": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
REPLICATED = {"dp_replicate": 2, "dp_shard": 1}

RANKS_GRADIENTS = {  # which rank holds the small one decides which collective must add it
    "fsdp": (FSDP, [[1.0], [SMALL]]),
    "hsdp, reduce-scatter": (HSDP, [[1.0], [SMALL], [0.0], [0.0]]),
    "hsdp, all-reduce": (HSDP, [[1.0], [0.0], [SMALL], [0.0]]),
    "hsdp of one shard": (REPLICATED, [[1.0], [SMALL]]),
}


def one_value(results):
    """The one value that every element has on every rank."""
    (value,) = {value for result in results for value in result["gradient"]}
    return value


@pytest.mark.parametrize("params_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", RANKS_GRADIENTS)
@pytest.mark.parametrize(("reduce_dtype", "total"), [("float32", 1.0009765625), (None, 1.0)])
def test_the_reduction_over_ranks(on_ranks, layout, params_dtype, reduce_dtype, total):
    mesh, per_rank = RANKS_GRADIENTS[layout]
    policy = {"params_dtype": params_dtype, "compute_dtype": "bfloat16", "reduce_dtype": reduce_dtype}
    results = on_ranks("precision_programs:reduced", len(per_rank), mesh=mesh, policy=policy, per_rank=per_rank)
    assert one_value(results) == total
    assert {result["gradient dtype"] for result in results} == {"torch.float32"}
    assert len({result["norm"] for result in results}) == 1
    assert results[0]["norm"] == pytest.approx(total * (2 * len(per_rank)) ** 0.5, rel=1e-7)


@pytest.mark.parametrize("params_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
@pytest.mark.parametrize(("reduce_dtype", "total"), [("float32", 258.0), (None, 256.0)])
def test_the_accumulation_over_micro_batches(on_ranks, layout, params_dtype, reduce_dtype, total):
    mesh, world_size = (FSDP, 2) if layout == "fsdp" else (HSDP, 4)
    per_rank = [[256.0, 1.0, 1.0]] + [[0.0, 0.0, 0.0]] * (world_size - 1)
    policy = {"params_dtype": params_dtype, "compute_dtype": "bfloat16", "reduce_dtype": reduce_dtype}
    results = on_ranks("precision_programs:reduced", world_size, mesh=mesh, policy=policy, per_rank=per_rank)
    assert one_value(results) == total


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("reduce_dtype", ["float32", None])
def test_float32_compute_reduces_in_float32_whether_said_or_not(on_ranks, reduce_dtype, offload):
    policy = {"compute_dtype": "float32", "reduce_dtype": reduce_dtype}
    results = on_ranks(
        "precision_programs:reduced", 2, mesh=FSDP, policy=policy, per_rank=[[256.0, 1.0], [1.0, SMALL]], offload=offload
    )
    assert one_value(results) == 258.0009765625


@pytest.mark.parametrize(
    ("params", "compute", "shard", "seen"),
    [
        ("float32", "float32", 1 + SMALL, ["torch.float32", 1 + SMALL]),
        ("float32", "bfloat16", 1 + SMALL, ["torch.bfloat16", 1.0]),
        ("bfloat16", "bfloat16", 1.0, ["torch.bfloat16", 1.0]),
        ("bfloat16", "float32", 1.0, ["torch.float32", 1.0]),
    ],
)
def test_what_the_model_computes_with_and_what_is_stored(on_ranks, params, compute, shard, seen):
    policy = {"params_dtype": params, "compute_dtype": compute}
    for result in on_ranks("precision_programs:reduced", 2, mesh=FSDP, policy=policy, per_rank=[[1.0], [1.0]]):
        assert result["shard"] == ["torch.float32", shard]  # the float32 master weights, rounded to their storage
        assert result["seen"] == seen
