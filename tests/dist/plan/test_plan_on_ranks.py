"""What a plan says, against what real ranks hold, byte for byte."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcli.config.load import load_config
from hpcli.config.validate import ResolvedConfig, resolve_config
from hpcli.plan.activations import FakeRuns
from hpcli.plan.communication import traffic
from hpcli.plan.estimate import Limits, make_plan
from hpcli.plan.memory import rank_memory
from hpcli.plan.pipeline import pipeline_of
from hpcli.plan.shards import held_by

TRAINING: dict[str, Any] = {"seq_length": 16, "global_batch_size": 16, "micro_batch_size": 1}
BF16 = {"params_dtype": "bfloat16", "compute_dtype": "bfloat16"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp3, uneven shards, a frozen matrix": {
        "model": {"preset": "decoder-tiny", "num_layers": 2, "ffn_size": 100, "freeze": ["layers.1.ffn.up.weight"]},
        "training": {"global_batch_size": 6},
        "parallelism": {"data_parallel_shard": 3},
        "fsdp_config": {"unit": "layer"},
    },
    "hsdp2x2, sgd, tied": {
        "model": {"preset": "decoder-tiny", "tie_embeddings": True},
        "optimizer": {"name": "sgd"},
        "parallelism": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    },
    "tp2+sp fsdp2": {
        "model": {"preset": "mla-tiny", "vocab_size": 257},
        "parallelism": {"tensor_parallel": 2, "sequence_parallel": True, "data_parallel_shard": 2},
    },
    "pp2 interleaved fsdp2": {
        "model": {"preset": "decoder-tiny"},
        "training": {"micro_batch_size": 2},
        "parallelism": {
            "pipeline_parallel": 2,
            "pipeline_parallel_schedule": "interleaved_1f1b",
            "data_parallel_shard": 2,
        },
    },
    "ep2 fsdp4": {
        "model": {"preset": "moe-tiny"},
        "parallelism": {"expert_parallel": 2, "data_parallel_shard": 4},
        "fsdp_config": {"unit": "layer"},
    },
    "fsdp8, offload, bfloat16": {
        "model": {"preset": "decoder-tiny", "freeze": ["norm.weight"]},
        "training": {**BF16, "accumulate_allreduce_grads_in_fp32": False, "activation_checkpointing": "full"},
        "parallelism": {"data_parallel_shard": 8},
        "fsdp_config": {"enable_offload": True},
    },
    "zbv, tied on one rank": {
        "model": {"preset": "decoder-tiny", "tie_embeddings": True},
        "training": {"params_dtype": "bfloat16"},
        "parallelism": {"pipeline_parallel": 2, "pipeline_parallel_schedule": "zbv", "data_parallel_shard": 2},
    },
    "pp2 tp2 fsdp2, tied across stages": {
        "model": {"preset": "decoder-tiny", "tie_embeddings": True},
        "training": {"micro_batch_size": 2, "compute_dtype": "bfloat16"},
        "parallelism": {"pipeline_parallel": 2, "tensor_parallel": 2, "data_parallel_shard": 2},
        "fsdp_config": {"unit": "layer"},
    },
    "a vision model, tp2+sp fsdp2, experts": {
        "model": {"preset": "vlm-tiny", "num_experts": 4, "experts_per_token": 1},
        "parallelism": {"tensor_parallel": 2, "sequence_parallel": True, "data_parallel_shard": 2, "expert_parallel": 2},
    },
}


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    def resolved(layout: str | dict[str, Any]) -> ResolvedConfig:
        sections = {"device": "cpu", **(LAYOUTS[layout] if isinstance(layout, str) else layout)}
        sections["training"] = {**TRAINING, **sections.get("training", {})}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(sections))
        return resolve_config(load_config(tmp_path / "plan.yaml", []), ranks=None)

    return resolved


def _arguments(resolved: ResolvedConfig) -> dict[str, Any]:
    mesh = {axis: getattr(resolved.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "ep", "tp")}
    return {"config": resolved.config.model_dump(), "mesh": mesh}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_gradients_and_optimizer_state_are_as_planned_on_every_rank(on_ranks, planned, name):
    resolved = planned(name)
    results = on_ranks("plan_programs:held", resolved.world_size, **_arguments(resolved))
    for rank, held in enumerate(results):
        memory = rank_memory(resolved.config, resolved.mesh, rank)._asdict()
        assert held == {kind: memory[kind] for kind in held}, f"rank {rank}"


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith("zbv")])
def test_activations_are_within_5_percent_of_what_autograd_keeps(on_ranks, planned, name):
    resolved = planned(name)
    config, mesh = resolved.config, resolved.mesh
    results = on_ranks("plan_programs:saved", resolved.world_size, **_arguments(resolved))
    runs = FakeRuns()
    expected = [sum(runs.stage(config, mesh, s.layers).saved for s in held_by(config, mesh, rank)) for rank in range(mesh.world_size)]
    measured = [result["saved"] for result in results]
    if mesh.ep > 1:  # tokens do not go evenly to the experts, and all ranks' together are as many
        expected, measured = [sum(expected)], [sum(measured)]
    assert measured == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_of_a_step_are_as_planned_in_number_and_bytes(on_ranks, planned, name):
    resolved = planned(name)
    config, mesh = resolved.config, resolved.mesh
    results = on_ranks("plan_programs:collectives", resolved.world_size, **_arguments(resolved))
    runs, pipeline = FakeRuns(), pipeline_of(config, mesh)
    planned_ranks, seen_ranks = [], []
    for rank, seen in enumerate(results):
        expected: dict[tuple[str, int, int], int] = defaultdict(int)
        for sent in traffic(config, mesh, rank, pipeline, runs):
            expected[sent.collective, sent.ranks, sent.bytes] += sent.times
        planned_ranks.append(sorted([*key, times] for key, times in expected.items()))
        seen_ranks.append(seen)
        assert _without_tokens(seen) == _without_tokens(planned_ranks[-1]), f"rank {rank}"
    # tokens do not go evenly to the experts, but all ranks together send as many, in as many messages
    assert _tokens(seen_ranks) == _tokens(planned_ranks)


def _without_tokens(rank: list[list[Any]]) -> list[list[Any]]:
    return [line for line in rank if line[0] != "all-to-all"]


def _tokens(ranks: list[list[list[Any]]]) -> tuple[int, int]:
    lines = [line for rank in ranks for line in rank if line[0] == "all-to-all"]
    return sum(times for *_, times in lines), sum(size * times for _, _, size, times in lines)


LARGER = {"preset": "decoder-small", "hidden_size": 512, "num_layers": 4, "ffn_size": 1024}
TOTALS: dict[str, dict[str, Any]] = {
    "fsdp2": {"training": {"global_batch_size": 4, "micro_batch_size": 2}},
    "fsdp2, micro-batches, recomputed": {"training": {"micro_batch_size": 2, "activation_checkpointing": "full"}},
    "fsdp2, bfloat16": {"training": {"global_batch_size": 4, "micro_batch_size": 2, "compute_dtype": "bfloat16"}},
    "pp2": {"training": {"micro_batch_size": 2}, "parallelism": {"pipeline_parallel": 2, "data_parallel_shard": 1}},
}


@pytest.mark.parametrize("name", TOTALS)
def test_the_total_is_near_the_worst_moment_of_a_real_step(on_ranks, planned, name):
    """Above it, but for what differs from run to run: gloo's threads free buffers a little sooner or later (1 % was seen)."""
    training = {"seq_length": 128, "global_batch_size": 8} | TOTALS[name]["training"]
    layers = {"model": LARGER, "parallelism": {"data_parallel_shard": 2}, "fsdp_config": {"unit": "layer"}}
    resolved = planned(layers | TOTALS[name] | {"training": training})
    results = on_ranks("plan_programs:peak", resolved.world_size, **_arguments(resolved))
    needs = make_plan(resolved.config, resolved.mesh, Limits(0, 0, 8), FakeRuns()).worst
    measured = max(result["peak"] for result in results) + needs.memory.parameters + needs.memory.optimizer_state
    assert 0.98 * measured <= needs.device <= 4 / 3 * measured
