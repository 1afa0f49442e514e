"""A run that resumes is the run that was never interrupted, bit for bit; on other ranks it starts from exactly the same state."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcli.checkpoint.export import export_weights
from hpcli.checkpoint.resume import prepare_resume
from hpcli.config.load import LoadedConfig
from hpcli.config.schema import Config
from hpcli.config.validate import ResolvedConfig, resolve_config

TIMES = ("seconds", "tokens_per_second", "path")
BFLOAT16 = {"params_dtype": "bfloat16", "compute_dtype": "bfloat16", "accumulate_allreduce_grads_in_fp32": False}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp4": (4, {}),
    "hsdp2x2": (4, {"parallelism": {"data_parallel_replicate": 2}}),
    "fsdp4 offload": (4, {"fsdp_config": {"enable_offload": True}}),
    "one rank, sgd": (1, {"optimizer": {"name": "sgd"}}),
    "fsdp2 bfloat16": (2, {"training": BFLOAT16}),
    "fsdp2 float16": (2, {"training": {"compute_dtype": "float16", "loss_scale": {"initial": 1024.0, "growth_interval": 3}}}),
    "frozen": (2, {"model": {"freeze": ["layers.0.*"]}}),
    "tp2+sp x fsdp2": (4, {"parallelism": {"tensor_parallel": 2, "sequence_parallel": True}}),
    "pp2 x fsdp2 tied": (4, {"parallelism": {"pipeline_parallel": 2}, "model": {"tie_embeddings": True}}),
    "pp2 interleaved": (
        2,
        {"parallelism": {"pipeline_parallel": 2, "pipeline_parallel_schedule": "interleaved_1f1b"}, "model": {"num_layers": 4}},
    ),
    "pp2 zbv tied": (
        2,
        {
            "parallelism": {"pipeline_parallel": 2, "pipeline_parallel_schedule": "zbv"},
            "model": {"tie_embeddings": True, "num_layers": 4},
            "fsdp_config": {"reshard_after_forward": False},
        },
    ),
    "ep2 x tp2": (4, {"model": {"preset": "moe-tiny"}, "parallelism": {"expert_parallel": 2, "tensor_parallel": 2}}),
}


def resolved(ranks: int, sections: dict[str, Any], steps: int = 6) -> ResolvedConfig:
    base: dict[str, Any] = {
        "device": "cpu",
        "model": {"preset": "decoder-tiny", "hidden_size": 16, "ffn_size": 32, "num_heads": 2, "num_kv_heads": 2, "num_layers": 2},
        "training": {"steps": steps, "global_batch_size": 8, "micro_batch_size": 1, "seq_length": 8},
        "optimizer": {"lr": 1e-2, "warmup_steps": 4},
        "checkpoint": {"every": 2},
        "logging": {"norm_table_every": 1},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections} - {"device"}}
    return resolve_config(LoadedConfig(Config.model_validate({**merged, "device": "cpu"}), "test", {}), ranks=ranks)


@pytest.fixture
def train(rank_server: Any, tmp_path: Path) -> Any:
    """Train, from a checkpoint or from the beginning; the records of steps and norms without their times."""

    def run(settings: ResolvedConfig, resume: Path | None = None) -> list[dict[str, Any]]:
        payload = {
            "config": settings.config.model_dump(mode="json"),
            "mesh": asdict(settings.mesh),
            "device": "cpu",
            "start": {},
            "checkpoints": str(tmp_path / "checkpoints"),
            "resume": None if resume is None else str(resume),
        }
        events: list[dict[str, Any]] = []
        rank_server.run("hpcli.train.loop:run", payload, settings.world_size, timeout_seconds=60.0, on_event=events.append)
        told = [event for event in events if event["event"] in ("step", "norm_table")]
        return [{key: value for key, value in event.items() if key not in TIMES} for event in told]

    return run


QUICK = ("fsdp4", "hsdp2x2", "fsdp4 offload", "fsdp2 float16", "pp2 x fsdp2 tied", "ep2 x tp2")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS])
def test_a_resumed_run_is_the_uninterrupted_one(train: Any, tmp_path: Path, name: str) -> None:
    settings = resolved(*LAYOUTS[name])
    whole = train(settings)
    assert [event["step"] for event in whole if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    again = train(settings, tmp_path / "checkpoints/step-00000002")
    assert again == whole[4:]  # a step and a table each


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (2, {}),
        (3, {"training": {"global_batch_size": 6}}),
        pytest.param(4, {"parallelism": {"tensor_parallel": 2}}, marks=pytest.mark.long),
        (2, {"parallelism": {"pipeline_parallel": 2}}),
        pytest.param(4, {"fsdp_config": {"enable_offload": True}}, marks=pytest.mark.long),
    ],
    ids=["2 ranks", "3 ranks", "tensor parallel", "pipeline", "offload"],
)
def test_another_layout_loads_exactly_the_same_state_and_says_so(
    train: Any, tmp_path: Path, ranks: int, sections: dict[str, Any]
) -> None:
    train(resolved(4, {}, steps=2))
    first = tmp_path / "checkpoints/step-00000002"
    export_weights(first, tmp_path / "before.safetensors")
    # with a learning rate of 0 another step changes no weight: what is saved then is what was loaded
    still = resolved(ranks, {**sections, "optimizer": {"lr": 0.0, "weight_decay": 0.0}}, steps=3)
    told = prepare_resume(first, still)
    assert told.step == 2
    assert any("layout changed: written by 4 ranks (dp_shard 4)" in notice for notice in told.notices) == (ranks != 4 or "parallelism" in sections)
    train(still, first)
    export_weights(tmp_path / "checkpoints/step-00000003", tmp_path / "after.safetensors")
    from safetensors.numpy import load_file

    before, after = (load_file(tmp_path / f"{when}.safetensors") for when in ("before", "after"))
    assert before.keys() == after.keys() and len(before) == 21
    assert all(np.array_equal(before[key], after[key]) for key in before)
