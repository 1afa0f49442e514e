"""Pipelines: what each rank holds and sends, micro-batches in exact numbers, and the mixtures that torch alone gets wrong.

That gradients are those of one process, for every schedule, is in test_layouts.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcli.models.presets import complete

SIZES = {"hidden_size": 32, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 32}
STAGES_ON_A_RANK = {"gpipe": 1, "1f1b": 1}  # the others: 2
ZERO_BUBBLE = ["interleaved_zero_bubble", "zbv", "dualpipev"]
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", *ZERO_BUBBLE]
FIRST_STAGE = ["embedding.*", "layers.0.*", "layers.1.*"]
LAST_STAGE = ["layers.2.*", "layers.3.*", "norm.*", "head.*"]


def config(schedule: str, mesh: dict[str, int], **sections: dict[str, Any]) -> dict[str, Any]:
    model = sections.pop("model", {})
    freeze = {"freeze": model.pop("freeze", [])}
    training = {"seq_length": 16, "global_batch_size": 8, "micro_batch_size": 1, "seed": 4, "max_norm": math.inf}
    parallelism = {
        "pipeline_parallel": mesh["pp"],
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_interleave_num": STAGES_ON_A_RANK.get(schedule, 2),
        "tensor_parallel": mesh.get("tp", 1),
    }
    fsdp = {"unit": "layer"} | ({"reshard_after_forward": False} if schedule in ZERO_BUBBLE else {})
    return {
        "model": {"preset": "decoder-tiny", **complete("decoder-tiny", SIZES | model), **freeze},
        "training": training | sections.pop("training", {}),
        "parallelism": parallelism | sections.pop("parallelism", {}),
        "fsdp_config": fsdp | sections.pop("fsdp_config", {}),
        **sections,
    }


@pytest.fixture
def check(on_ranks: Any) -> Any:
    """``check(schedule, mesh, section={key: value})``: the gradients are those of one process, and the norm is on every rank."""

    def run(schedule: str, mesh: dict[str, int], **sections: dict[str, Any]) -> None:
        settings = config(schedule, mesh, **sections)
        results = on_ranks("layout_programs:gradients", math.prod(mesh.values()), config=settings, mesh=mesh)
        assert all(result["worst"] < 1e-6 for result in results), [(r["worst"], r["name"]) for r in results]
        assert len({result["norm_bits"] for result in results}) == 1
        assert results[0]["norms"][0] == pytest.approx(results[0]["reference_norm"], rel=1e-6)
        assert results[0]["losses"][0] == pytest.approx(results[0]["reference_loss"], rel=1e-6)
        assert results[0]["reference_norm"] > 0.1

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_are_added_up_in_the_reduce_dtype(on_ranks, schedule):
    """256 + 1 is 256 in bfloat16. Told the shapes or not: finding them out leaves no gradient behind."""
    for reduce_dtype, total in (("float32", 259.0), (None, 256.0)):
        results = on_ranks(
            "pp_programs:witness",
            4,
            schedule=schedule,
            values=[256.0, 1.0, 1.0, 1.0],
            reduce_dtype=reduce_dtype,
            told_shapes=reduce_dtype is None,
        )
        for result in results:
            assert result["gradients"] == [[total] * 4] * result["stages"]
            assert result["dtypes"] == ["torch.float32"]
            assert result["reduce_scatters"] == result["stages"]  # with the last micro-batch alone
        assert sorted(result["loss"] for result in results if result["loss"] is not None) == [0.0, 4 * 259.0]


def test_what_would_give_wrong_gradients_is_refused(on_ranks):
    names = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
    for said in on_ranks("pp_programs:refused", 2, schedules=names):
        assert [message.split()[0] for message in said] == [*ZERO_BUBBLE, "a"]
        for message in said[:3]:
            assert "needs fully_shard(..., reshard_after_forward=False), and 1 frees its parameters after forward" in message
        assert said[3] == "a pipeline needs a mesh with an axis pp of at least 2 ranks, and this one has dp_shard"


def test_a_rank_holds_its_stages_alone_under_the_names_of_the_whole_model(on_ranks):
    mesh = {"pp": 2, "dp_shard": 2}
    settings = config("interleaved_1f1b", mesh)
    results = on_ranks("pp_programs:held", 4, config=settings, mesh=mesh)
    layers = [{name.split(".")[1] for name in r["names"] if name.startswith("layers.")} for r in results]
    assert layers == [{"0", "2"}, {"0", "2"}, {"1", "3"}, {"1", "3"}]
    outside = [[name for name in r["names"] if not name.startswith("layers.")] for r in results]
    assert outside == [["embedding.weight"]] * 2 + [["head.weight", "norm.weight"]] * 2
    assert results[0]["allocated"] + results[2]["allocated"] == results[0]["parameter_count"]
    for result in results:
        assert result["loss"] == results[0]["loss"] > 5.0  # whichever rank has the last stage
        assert result["norm"] == results[0]["norm"]
        assert result["reduce_scatters"] == 3  # two layers, and the embedding or the norm and head; not once per micro-batch
        assert {"forward", "backward", "gradient norm", "optimizer"} <= set(result["phases"])
        assert result["gradients_left"] == 0
        assert result["row"]["with_gradient"] == len(result["names"])
    assert math.hypot(*(r["row"]["contributed"] for r in results)) == pytest.approx(float.fromhex(results[0]["norm"]))


@pytest.mark.parametrize(
    ("schedule", "freeze"),
    [("1f1b", FIRST_STAGE), ("1f1b", LAST_STAGE), ("zbv", ["layers.1.*", "layers.2.*"])],
    ids=["first", "last", "middle"],
)
def test_a_stage_may_be_frozen_as_a_whole(check, schedule, freeze):
    check(schedule, {"pp": 2, "dp_shard": 2}, model={"freeze": freeze})


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_rank_without_trainable_parameters_takes_part_in_the_step(on_ranks, optimizer):
    settings = config("1f1b", {"pp": 2}, model={"freeze": FIRST_STAGE}, optimizer={"name": optimizer})
    frozen, trained = on_ranks("pp_programs:held", 2, config=settings, mesh={"pp": 2})
    assert (frozen["row"]["with_gradient"], frozen["row"]["contributed"]) == (0, 0.0)
    assert frozen["norm"] == trained["norm"]
    assert trained["row"]["contributed"] == pytest.approx(float.fromhex(trained["norm"]), rel=1e-7)
    assert frozen["loss"] == trained["loss"]
    assert frozen["updates"] == trained["updates"] == 1  # what a checkpoint keeps is the first rank's


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_zero_bubble_with_tensor_parallelism_recomputation_and_offload(check, schedule):
    check(
        schedule,
        {"pp": 2, "tp": 2},
        parallelism={"sequence_parallel": True},
        training={"activation_checkpointing": "full"},
        fsdp_config={"enable_offload": True},
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_replicas_of_a_tied_stage_hold_the_same_bits(check, schedule):
    """One of the replicas counts the tied matrix, or its other stage does; the norms that they compare must not show it."""
    check(schedule, {"pp": 2, "dp_shard": 2, "dp_replicate": 2}, model={"tie_embeddings": True})


@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "layers", "sequences"),
    [
        ("1f1b", 3, 1, 3, 3),
        ("interleaved_1f1b", 3, 2, 6, 6),
        ("interleaved_1f1b", 2, 3, 6, 4),
        ("gpipe", 8, 1, 8, 3),
        ("zbv", 4, 2, 8, 3),
        ("dualpipev", 2, 2, 4, 5),
        ("interleaved_zero_bubble", 2, 2, 4, 1),
    ],
)
def test_other_numbers_of_stages_and_micro_batches(check, schedule, pp, stages, layers, sequences):
    check(
        schedule,
        {"pp": pp},
        model={"tie_embeddings": True, "num_layers": layers},
        parallelism={"pipeline_parallel_interleave_num": stages},
        training={"global_batch_size": sequences},
    )


def test_the_clip_of_a_stage_is_that_of_all_stages_without_being_told(on_ranks):
    for result in on_ranks("pp_programs:norms_without_mesh", 2):
        assert result == dict.fromkeys(("module", "modules", "list", "generator", "tensor"), 5.0)
