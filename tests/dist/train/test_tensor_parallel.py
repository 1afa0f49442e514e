"""Tensor and sequence parallelism: what modules see, which gradients are parts, how they are added up, and what comes out.

``test_layouts`` has the mixtures with every other kind of parallelism; here are the cases that only this kind has.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcli.models.presets import complete

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 32}
LATENT = {key: size for key, size in SIZES.items() if key != "num_kv_heads"}


def config(preset: str = "decoder-tiny", sp: bool = False, tp: int = 2, **changed: Any) -> dict[str, Any]:
    sections = {name: changed.pop(name) for name in ("training", "fsdp_config") if name in changed}
    freeze = {"freeze": changed.pop("freeze", [])}
    sizes = LATENT if preset.startswith("mla") else SIZES
    training = {"seq_length": 16, "global_batch_size": 8, "micro_batch_size": 2, "seed": 4, "max_norm": math.inf}
    return {
        "model": {"preset": preset, **complete(preset, sizes | changed), **freeze},
        "training": training | sections.pop("training", {}),
        "parallelism": {"tensor_parallel": tp, "sequence_parallel": sp},
        **sections,
    }


@pytest.mark.parametrize(("sharded", "checkpointing"), [(False, False), (True, False), (True, True)])
def test_a_module_computes_on_plain_cut_tensors_and_stores_dtensors(on_ranks, sharded, checkpointing):
    for told in on_ranks("tp_programs:seen_in_forward", 2, sharded=sharded, checkpointing=checkpointing):
        assert told["seen"] == ["Tensor (3, 2)", "Tensor (6,)"] * (2 if checkpointing else 1)
        assert told["after"] == ["DTensor"] * 3
        assert told["tied"]
        assert told["matrix bytes"] == 3 * 2 * 4  # not a view that keeps the whole alive
        # each rank has 6 ones of the matrix: y = 6 x + 6, z = 6 y + 6; x is 4 ones, y 4 twelves
        assert told["gradients"] == [[4 * 1 * 6 + 4 * 12.0] * 12, [4 * 6.0] * 6, [4.0] * 6]
        assert told["failed"]
        assert told["left behind"] == []


NORMS = ["layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "norm.weight"]
LATENTS = [f"layers.0.attention.{name}.weight" for name in ("query_down", "query_norm", "kv_down", "kv_norm")]


@pytest.mark.parametrize(
    ("preset", "sp", "changed", "expected"),
    [
        ("decoder-tiny", False, {}, []),
        ("decoder-tiny", True, {}, NORMS),
        ("mla-tiny", False, {}, LATENTS),
        ("mla-tiny", True, {}, LATENTS + NORMS),
        ("mla-tiny", True, {"freeze": ["*norm.weight"]}, [name for name in LATENTS if "norm" not in name]),
        ("moe-tiny", False, {"first_dense_layers": 0}, ["layers.0.moe.router.weight"]),
    ],
)
def test_which_gradients_are_parts_on_each_tensor_parallel_rank(on_ranks, preset, sp, changed, expected):
    settings = config(preset, sp, num_layers=1, **changed)
    for names in on_ranks("tp_programs:marked", 2, config=settings, mesh={"tp": 2}):
        assert sorted(names) == sorted(expected)


NATIVE = {"params_dtype": "bfloat16", "compute_dtype": "bfloat16", "reduce_dtype": None}
SMALL = 2.0**-10  # 1 + 2^-10 is a float32 and no bfloat16


@pytest.mark.parametrize("policy", [NATIVE, NATIVE | {"reduce_dtype": "float32"}, {}], ids=str)
@pytest.mark.parametrize(
    ("mesh", "factors", "total"),
    [
        ({"tp": 2}, [[1.0], [SMALL]], 1.0009765625),  # pytorch#190626: one data-parallel rank
        ({"tp": 2}, [[1.0, 2.0], [SMALL, 0.0]], 3.0009765625),
        ({"tp": 2, "dp_shard": 2}, [[1.0], [SMALL], [0.0], [0.0]], 1.0009765625),
    ],
    ids=str,
)
def test_parts_are_added_up_in_float32_by_one_all_reduce_for_all_parameters(on_ranks, mesh, factors, total, policy):
    for told in on_ranks("tp_programs:partial_sum", len(factors), mesh=mesh, policy=policy, factors=factors):
        assert told["first"] == [total]
        assert told["first call"]["allreduce"] == 1
        assert told["second"] == [total]  # complete gradients are not added up again


@pytest.mark.parametrize(
    ("sp", "expected"),
    [
        (False, {"allreduce": 1 + 2 * 2}),  # the embedding, and two regions in each of two layers
        (True, {"reducescatter": 1 + 2 * 2, "allgather": 2 * 2 + 1}),  # and the head's entrance
    ],
)
def test_a_forward_pass_communicates_once_at_each_border_of_a_region(on_ranks, sp, expected):
    for counts in on_ranks("tp_programs:forward_collectives", 2, config=config(sp=sp), mesh={"tp": 2}):
        assert counts == expected


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ({"tp": 4}, config(tp=4)),  # one key head for two query heads on each rank
        ({"tp": 2, "dp_shard": 2}, config(vocab_size=257)),
        ({"tp": 4}, config(sp=True, tp=4, vocab_size=259, tie_embeddings=True)),
        ({"tp": 2, "dp_shard": 2, "dp_replicate": 2}, config(sp=True)),
        ({"tp": 2}, config("mla-tiny", sp=True, q_lora_rank=0, v_head_dim=12, qk_rope_head_dim=6)),
        (
            {"tp": 2, "dp_shard": 2},
            config(
                "mla-tiny",
                sp=True,
                freeze=["layers.0.*", "embedding.*", "*.kv_norm.weight"],
                training={"activation_checkpointing": "full"},
                fsdp_config={"unit": "layer", "enable_offload": True},
            ),
        ),
    ],
    ids=["gqa tp4", "uneven vocabulary", "tied uneven sp", "hsdp sp", "mla direct queries sp", "frozen checkpointed offloaded"],
)
def test_gradients_are_those_of_one_process(on_ranks, mesh, settings):
    results = on_ranks("layout_programs:gradients", math.prod(mesh.values()), config=settings, mesh=mesh)
    assert all(result["worst"] < 1e-6 for result in results), [(r["worst"], r["name"]) for r in results]
    assert len({result["norm_bits"] for result in results}) == 1
    assert results[0]["norms"][0] == pytest.approx(results[0]["reference_norm"], rel=1e-6)
    assert results[0]["losses"][0] == pytest.approx(results[0]["reference_loss"], rel=1e-6)
    assert results[0]["reference_norm"] > 0.1


@pytest.mark.parametrize("fp32_reduce", [True, False])
@pytest.mark.parametrize(("preset", "mesh"), [("decoder-tiny", {"tp": 2}), ("mla-tiny", {"tp": 2, "dp_shard": 2})])
def test_in_bfloat16_it_is_no_farther_from_float32_than_one_process_is(on_ranks, tmp_path, preset, mesh, fp32_reduce):
    training = {
        "params_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "accumulate_allreduce_grads_in_fp32": fp32_reduce,
    }
    settings = config(preset, sp=True, training=training)
    told = on_ranks(
        "tp_programs:against_replay", math.prod(mesh.values()), config=settings, mesh=mesh, folder=str(tmp_path)
    )[0]
    assert told["loss"] == pytest.approx(told["replayed loss"], rel=2e-4)
    assert 0 < told["from replay"] < 1.5 * told["replay from float32"]
    assert told["from float32"] < 1.5 * told["replay from float32"]
    assert told["replay from float32"] < 1e-2
    assert told["worst"] < 5e-2, told["worst name"]  # a part that was not added up would be off by about a half


def test_what_a_sequence_entrance_computes_is_whole_on_every_rank(on_ranks):
    for result in on_ranks("tp_programs:entered", 2):
        assert result["out"] == [1, 2, 1]
        assert result["gradients"] == [[1.0, 1.0, 1.0, 1.0], [4.0]]  # not twice, though both ranks computed it
        assert result["norm"] == pytest.approx(20**0.5, rel=1e-7)
