"""The vision-language model on real ranks. More of its layouts are among those of test_layouts.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcli.models.presets import complete

SIZES = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
    "image_height": 16,
    "image_width": 24,
    "vision_hidden_size": 24,
    "vision_layers": 2,
    "vision_ffn_size": 32,
}
EXPERTS = {"num_experts": 4, "expert_ffn_size": 16}
LAYERS = {"training": {"activation_checkpointing": "full"}, "fsdp_config": {"unit": "layer"}}
SP = {"parallelism": {"tensor_parallel": 2, "sequence_parallel": True}}
PP = {"pipeline_parallel": 2, "pipeline_parallel_interleave_num": 1}
ZBV = {"pipeline_parallel": 2, "pipeline_parallel_schedule": "zbv", "pipeline_parallel_interleave_num": 2}


def config(model: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    training = {"seq_length": 16, "global_batch_size": 8, "micro_batch_size": 1, "seed": 4, "max_norm": 0.5}
    training |= sections.pop("training", {})
    return {"model": {"preset": "vlm-tiny", **complete("vlm-tiny", SIZES | model)}, "training": training, **sections}


def ranks(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "ep")


@pytest.mark.parametrize(
    ("model", "mesh", "sections"),
    [
        ({}, {"dp_shard": 4}, {}),
        ({}, {"dp_replicate": 2, "dp_shard": 2}, LAYERS),
        ({"freeze": ["vision.*"]}, {"dp_shard": 2}, LAYERS),
        ({"freeze": ["vision.layers.*", "embedding.*"]}, {"tp": 2}, SP),
        ({"attention": "mla", "tie_embeddings": True} | EXPERTS, {"tp": 2, "dp_shard": 2, "ep": 2}, SP),
        ({"freeze": ["vision.*", "projector.*"]}, {"pp": 2}, {"parallelism": PP}),
        ({"num_layers": 4}, {"pp": 2, "dp_shard": 2}, {"parallelism": ZBV, "fsdp_config": {"reshard_after_forward": False}}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_process(on_ranks, model, mesh, sections):
    results = on_ranks("layout_programs:gradients", ranks(mesh), config=config(model, **sections), mesh=mesh)
    assert all(result["worst"] < 1e-6 for result in results), [(r["worst"], r["name"]) for r in results]
    assert len({result["norm_bits"] for result in results}) == 1
    assert results[0]["norms"][0] == pytest.approx(results[0]["reference_norm"], rel=1e-6)
    assert results[0]["losses"][0] == pytest.approx(results[0]["reference_loss"], rel=1e-6)
    assert results[0]["reference_norm"] > 0.1


@pytest.mark.parametrize(
    ("model", "mesh", "parallelism"),
    [
        ({}, {"dp_shard": 4}, {}),
        (EXPERTS, {"tp": 2, "dp_shard": 2, "ep": 2}, {"tensor_parallel": 2}),
    ],
    ids=str,
)
def test_offload_changes_not_one_bit(on_ranks, model, mesh, parallelism):
    dtypes = {"compute_dtype": "bfloat16", "micro_batch_size": 2}
    sections = {"training": dtypes, "parallelism": parallelism}
    here, offloaded = (
        on_ranks(
            "layout_programs:gradients",
            4,
            config=config(model, **sections, fsdp_config={"enable_offload": offload}),
            mesh=mesh,
            steps=3,
        )[0]
        for offload in (False, True)
    )
    for key in ("losses", "norms"):
        assert here[key] == offloaded[key], key
    assert here["losses"][2] < here["losses"][0]


def test_ranks_that_exchange_images_within_their_shares_have_another_loss(on_ranks):
    mesh = {"dp_shard": 4}
    settings = config({}, training={"micro_batch_size": 2})
    right, exchanged = (
        on_ranks("vlm_programs:loss_and_norm", 4, config=settings, mesh=mesh, exchange=exchange) for exchange in (False, True)
    )
    for told in (right, exchanged):
        assert told == [told[0]] * 4  # every rank says the same
    (loss, norm), (other_loss, other_norm) = right[0], exchanged[0]
    assert loss == pytest.approx(math.log(256), abs=0.1)
    assert other_loss != loss and other_norm != norm
