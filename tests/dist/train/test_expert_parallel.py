"""Expert parallelism: how rows travel, what each rank has of the experts, and that gradients are those of one process.

``test_layouts`` has the mixtures with every other kind of parallelism; here are the cases that only this kind has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest

from hpcli.models.presets import complete

SIZES = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 16,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_size": 8,
    "first_dense_layers": 0,
}
FULL = {"training": {"activation_checkpointing": "full"}, "fsdp_config": {"unit": "layer", "enable_offload": True}}
KEEP = {"unit": "layer", "reshard_after_forward": False}


def config(mesh: dict[str, int], freeze: tuple[str, ...] = (), **changed: Any) -> dict[str, Any]:
    sections = {name: changed.pop(name) for name in ("training", "fsdp_config", "parallelism") if name in changed}
    training = {"seq_length": 8, "global_batch_size": 16, "micro_batch_size": 1, "seed": 4, "max_norm": math.inf}
    parallelism = {"tensor_parallel": mesh.get("tp", 1), "pipeline_parallel": mesh.get("pp", 1)}
    return {
        "model": {"preset": "moe-tiny", **complete("moe-tiny", SIZES | changed), "freeze": list(freeze)},
        "training": training | sections.pop("training", {}),
        "parallelism": parallelism | sections.pop("parallelism", {}),
        **sections,
    }


def ranks_of(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "ep")


# row i of rank r is 10 r + i + 1; expert e, of which each rank has two, multiplies by e + 1
def test_rows_travel_to_their_expert_and_back(on_ranks):
    first, second = on_ranks("ep_programs:dispatched", 2, experts=4, chosen=[[3, 0, 3], [1]])
    assert (first["arrived"], first["counts"]) == ([2.0, 11.0], [1, 1])
    assert (second["arrived"], second["counts"]) == ([1.0, 3.0], [0, 2])
    assert (first["out"], second["out"]) == ([1 * 4.0, 2 * 1.0, 3 * 4.0], [11 * 2.0])
    assert (first["rows gradient"], second["rows gradient"]) == ([4.0, 1.0, 4.0], [2.0])
    assert (first["factors gradient"], second["factors gradient"]) == ([2.0, 11.0], [0.0, 1.0 + 3.0])  # expert 2 is idle
    # the counts, the rows there and back; backward the gradients there and back
    assert first["collectives"] == second["collectives"] == [{"alltoall": 3}, {"alltoall": 2}]


@pytest.mark.parametrize(
    ("chosen", "arrived", "out"),
    [
        # by expert, then by rank, then as they came: the order of the sums does not depend on the number of ranks
        ([[1, 0, 1], [0, 1]], [[2.0, 11.0, 1.0, 3.0, 12.0], []], [[2.0, 2.0, 6.0], [11.0, 24.0]]),
        ([[2, 2], []], [[], [1.0, 2.0]], [[3.0, 6.0], []]),  # a rank without rows, and one without arrivals
        ([[], []], [[], []], [[], []]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_rank_waits_for_one_without_rows(on_ranks, chosen, arrived, out, dtype):
    results = on_ranks("ep_programs:dispatched", 2, experts=4, chosen=chosen, dtype=dtype)
    assert [result["arrived"] for result in results] == arrived
    assert [result["out"] for result in results] == out
    assert all(len(result["factors gradient"]) == 2 for result in results)


def check(results: list[dict[str, Any]]) -> None:
    assert all(result["worst"][0] < 1e-6 for result in results), [result["worst"] for result in results]
    held: dict[Any, set[str]] = defaultdict(set)
    for result in results:
        assert result["norm"] == results[0]["norm"] == pytest.approx(result["reference norm"], rel=1e-6)
        assert result["loss"] == pytest.approx(result["reference loss"], rel=1e-6)
        for name, (pieces, bits) in result["shards"].items():
            held[name, pieces].add(bits)
    assert [key for key, bits in held.items() if len(bits) > 1] == []  # replicas, bit for bit
    assert results[0]["reference norm"] > 0.1


@pytest.mark.parametrize(
    ("mesh", "changed"),
    [
        ({"dp_shard": 2, "ep": 2}, {}),
        ({"dp_shard": 4, "ep": 2}, {"num_shared_experts": 0}),
        ({"dp_shard": 8, "ep": 4}, {"attention": "mla"} | FULL),
        ({"dp_shard": 8, "ep": 8}, {}),
        ({"dp_shard": 2, "ep": 2, "dp_replicate": 2}, {"experts_per_token": 1}),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, {}),
        ({"dp_shard": 4, "ep": 2, "tp": 2}, {"parallelism": {"sequence_parallel": True}}),
        ({"dp_replicate": 2, "tp": 2}, {}),  # experts on every rank
        ({"dp_shard": 2, "ep": 2}, {"freeze": ("layers.*.moe.experts.*",)}),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, {"freeze": ("*.router.*", "embedding.*", "layers.0.*")} | FULL),
        ({"pp": 2, "dp_shard": 2, "ep": 2}, {"first_dense_layers": 1}),  # no experts on the first stage
        (
            {"pp": 2, "dp_shard": 2, "ep": 2},
            {
                "num_layers": 4,
                "parallelism": {"pipeline_parallel_schedule": "zbv", "pipeline_parallel_interleave_num": 2},
                "fsdp_config": KEEP,
            },
        ),
    ],
    ids=str,
)
def test_every_shard_of_every_gradient_is_that_of_one_process(on_ranks, mesh, changed):
    results = on_ranks("ep_programs:gradients", ranks_of(mesh), config=config(mesh, **changed), mesh=mesh)
    check(results)
    assert any(result["experts"] for result in results) is ("experts" not in str(changed.get("freeze")))


def test_hundreds_of_experts_most_of_them_idle(on_ranks):
    mesh = {"dp_shard": 4, "ep": 4}
    settings = config(mesh, num_experts=256, training={"seq_length": 4, "global_batch_size": 4})
    results = on_ranks("ep_programs:gradients", 4, config=settings, mesh=mesh)
    check(results)
    for layer in ("layers.0.moe.experts", "layers.1.moe.experts"):
        counts = [count for result in results for count in result["counts"][layer]]
        assert sum(counts) == 4 * 4 * 2  # each of 4 tokens on 4 ranks reaches 2 experts: none is dropped
        assert counts.count(0) >= 256 - 32
        for name in ("gate", "up", "down"):  # gradients of zeros, and no others
            assert [idle for result in results for idle in result["idle"][f"{layer}.{name}"]] == [not c for c in counts]


def test_replicas_and_offload_change_no_bit_of_several_steps(on_ranks):
    mesh = {"dp_shard": 2, "ep": 2, "dp_replicate": 2}
    runs = [
        on_ranks("ep_programs:several_steps", 4, config=config(mesh, fsdp_config=fsdp), mesh=mesh, steps=3)
        for fsdp in ({}, {"enable_offload": True}, {"unit": "layer"})
    ]
    assert runs[0] == runs[1] == runs[2]
    weights = [result["weights"] for result in runs[0]]
    assert weights[:2] == weights[2:]  # two replicas of two shards
    assert weights[0] != weights[1]
    assert len({tuple(result["norms"]) for result in runs[0]}) == 1


@pytest.mark.parametrize(
    ("mesh", "changed", "expected"),
    [
        (
            {"dp_shard": 2, "ep": 2},
            {"num_experts": 5},
            "layers.0.moe.experts.gate, dim 0: 5 is not divisible by expert_parallel 2; 4 or 6 would work",
        ),
        ({"tp": 2}, {"expert_ffn_size": 9}, "layers.0.moe.experts.down, dim 2: 9 is not divisible by tensor_parallel 2"),
        (
            {"dp_shard": 2},
            {"hidden_size": 17, "num_heads": 1, "num_kv_heads": 1},
            "layers.0.moe.experts.up, dim 2: 17 is not divisible by data_parallel_shard / expert_parallel 2",
        ),
    ],
)
def test_experts_that_cannot_be_cut_evenly_are_refused(on_ranks, mesh, changed, expected):
    settings = config(mesh, **changed)
    for told in on_ranks("ep_programs:refused", 2, config=settings, mesh=mesh):
        assert told.startswith("LayoutError: ")
        assert expected in told


def test_a_plan_that_does_not_say_how_tensor_parallelism_cuts_experts_is_refused(on_ranks):
    settings = config({"tp": 2})
    for told in on_ranks("ep_programs:refused", 2, config=settings, mesh={"tp": 2}, split=False):
        assert told.startswith("ValueError: layers.0.moe.experts.gate holds experts, and tensor_split does not say")


@pytest.mark.parametrize("fp32_reduce", [True, False])
def test_in_bfloat16_it_is_no_farther_from_float32_than_one_process_is(on_ranks, tmp_path, fp32_reduce):
    mesh = {"dp_shard": 4, "ep": 2}
    training = {
        "params_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "accumulate_allreduce_grads_in_fp32": fp32_reduce,
    }
    settings = config(mesh, training=training)
    told = on_ranks("tp_programs:against_replay", 4, config=settings, mesh=mesh, folder=str(tmp_path))[0]
    assert told["loss"] == pytest.approx(told["replayed loss"], rel=2e-4)
    # the same tokens, rounded alike, go to the same experts; a sum over 4 ranks in bfloat16 rounds (by 2**-9 at most) up to 4 times more
    assert told["from replay"] < (0.5 * told["replay from float32"] if fp32_reduce else 4**0.5 * 2**-9)
    assert told["from float32"] < 1.5 * told["replay from float32"]
    assert told["worst"] < 5e-2, told["worst name"]
