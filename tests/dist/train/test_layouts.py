"""Every kind of parallelism, and their mixtures: loss and each gradient against the same model in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcli.models.presets import complete

SIZES = {"hidden_size": 32, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 32}
LATENT = {key: SIZES[key] for key in ("hidden_size", "num_layers", "num_heads", "ffn_size")}
EXPERTS = SIZES | {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 16, "first_dense_layers": 1}
VISION = SIZES | {"image_height": 16, "image_width": 32, "vision_hidden_size": 32, "vision_ffn_size": 32}
MODELS = {
    "decoder": ("decoder-tiny", SIZES),
    "tied": ("decoder-tiny", SIZES | {"tie_embeddings": True}),
    "mla": ("mla-tiny", LATENT),
    "moe": ("moe-tiny", EXPERTS),
    "moe-mla": ("moe-tiny", LATENT | {"attention": "mla", "num_experts": 8, "expert_ffn_size": 16}),
    "vlm": ("vlm-tiny", VISION),
    "vlm-moe": ("vlm-tiny", VISION | {"num_experts": 4, "expert_ffn_size": 16}),
}


def config(model: str, mesh: dict[str, int], **sections: dict[str, Any]) -> dict[str, Any]:
    preset, sizes = MODELS[model]
    training = {"seq_length": 16, "global_batch_size": 16, "micro_batch_size": 1, "seed": 4, "max_norm": math.inf}
    parallelism = {"tensor_parallel": mesh.get("tp", 1), "pipeline_parallel": mesh.get("pp", 1)}
    parallelism |= {"pipeline_parallel_interleave_num": 1} | sections.pop("parallelism", {})
    training |= sections.pop("training", {})
    described = {"preset": preset, **complete(preset, sizes)}
    return {"model": described, "training": training, "parallelism": parallelism, **sections}


def check(results: list[dict[str, Any]]) -> None:
    assert all(result["worst"] < 1e-6 for result in results), [(r["worst"], r["name"]) for r in results]
    assert len({result["norm_bits"] for result in results}) == 1
    assert results[0]["norms"][0] == pytest.approx(results[0]["reference_norm"], rel=1e-6)
    assert results[0]["losses"][0] == pytest.approx(results[0]["reference_loss"], rel=1e-6)
    assert results[0]["reference_norm"] > 0.1


SP = {"sequence_parallel": True}
FULL = {"training": {"activation_checkpointing": "full"}, "fsdp_config": {"unit": "layer", "enable_offload": True}}


@pytest.mark.parametrize(
    ("model", "mesh", "sections"),
    [
        ("decoder", {"tp": 2}, {}),
        ("decoder", {"tp": 2}, {"parallelism": SP}),
        ("tied", {"tp": 2, "dp_shard": 2}, {"parallelism": SP, **FULL}),
        ("decoder", {"tp": 8}, {}),
        ("mla", {"tp": 2, "dp_shard": 2}, {"parallelism": SP}),
        ("mla", {"tp": 4}, {}),
        ("mla", {"tp": 2, "dp_shard": 2, "dp_replicate": 2}, {"parallelism": SP}),
        ("moe", {"dp_shard": 2}, {}),
        ("moe", {"dp_shard": 4, "ep": 4}, {}),
        ("moe", {"dp_shard": 4, "ep": 2}, FULL),
        ("moe", {"dp_shard": 2, "ep": 2, "tp": 2}, {"parallelism": SP}),
        ("moe-mla", {"dp_shard": 4, "ep": 2, "dp_replicate": 2}, {}),
        ("vlm", {"dp_shard": 2, "tp": 2}, {"parallelism": SP}),
        ("vlm-moe", {"dp_shard": 2, "tp": 2, "ep": 2}, FULL),
    ],
    ids=str,
)
def test_tensor_sequence_and_expert_parallel_gradients_are_those_of_one_process(on_ranks, model, mesh, sections):
    check(on_ranks("layout_programs:gradients", math.prod(_sizes(mesh)), config=config(model, mesh, **sections), mesh=mesh))


def schedule(name: str, stages: int = 1, **more: Any) -> dict[str, Any]:
    options = {"pipeline_parallel_schedule": name, "pipeline_parallel_interleave_num": stages}
    return {"parallelism": options | more}


KEEP = {"fsdp_config": {"reshard_after_forward": False, "unit": "layer"}}


@pytest.mark.parametrize(
    ("model", "mesh", "sections"),
    [
        ("decoder", {"pp": 2, "dp_shard": 2}, schedule("gpipe")),
        ("decoder", {"pp": 2, "dp_shard": 2}, schedule("1f1b") | {"fsdp_config": {"unit": "layer"}}),
        ("decoder", {"pp": 2, "dp_shard": 2}, schedule("interleaved_1f1b", 2)),
        ("decoder", {"pp": 2, "dp_shard": 2}, schedule("interleaved_zero_bubble", 2) | KEEP),
        ("decoder", {"pp": 2, "dp_shard": 2}, schedule("zbv", 2) | KEEP),
        ("decoder", {"pp": 2, "dp_shard": 2}, schedule("dualpipev", 2) | KEEP),
        ("decoder", {"pp": 4}, schedule("1f1b")),
        ("tied", {"pp": 2, "dp_shard": 2}, schedule("1f1b")),
        ("tied", {"pp": 2}, schedule("zbv", 2) | KEEP),
        ("mla", {"pp": 2, "dp_shard": 2, "tp": 2}, schedule("interleaved_1f1b", 2, sequence_parallel=True)),
        ("moe", {"pp": 2, "dp_shard": 2, "ep": 2, "tp": 2}, schedule("1f1b", 1, sequence_parallel=True) | FULL),
        ("vlm", {"pp": 2, "dp_shard": 2}, schedule("1f1b")),
    ],
    ids=str,
)
def test_pipeline_gradients_are_those_of_one_process(on_ranks, model, mesh, sections):
    check(on_ranks("layout_programs:gradients", math.prod(_sizes(mesh)), config=config(model, mesh, **sections), mesh=mesh))


def _sizes(mesh: dict[str, int]) -> list[int]:
    return [size for axis, size in mesh.items() if axis != "ep"]


def test_tied_copies_stay_equal_over_several_steps(on_ranks):
    alone = on_ranks("layout_programs:gradients", 1, config=config("tied", {}), mesh={}, steps=4)[0]
    for mesh, sections in (({"pp": 2}, schedule("1f1b")), ({"pp": 2}, schedule("zbv", 2) | KEEP)):
        both = on_ranks("layout_programs:gradients", 2, config=config("tied", mesh, **sections), mesh=mesh, steps=4)
        assert both[0]["losses"] == pytest.approx(alone["losses"], rel=2e-6)
        assert both[0]["norms"] == pytest.approx(alone["norms"], rel=2e-6)
