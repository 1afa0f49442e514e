"""Bytes that a person can add up, and the verdict on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcli.config.load import load_config
from hpcli.config.overrides import Override
from hpcli.config.validate import resolve_config
from hpcli.plan.activations import FakeRuns
from hpcli.plan.estimate import Limits, class_of, make_plan
from hpcli.plan.memory import rank_memory
from hpcli.plan.pipeline import pipeline_of

TOWER = Path(__file__).parents[4] / "examples" / "configs" / "tower_1t_fsdp128_ep128.yaml"
GIB = 2**30
TINY = {"preset": "decoder-tiny", "num_layers": 1, "ffn_size": 64}
# embedding 256 x 64, head 256 x 64, query and output 64 x 64, key and value 32 x 64, ffn 3 x 64 x 64, three norms of 64
ELEMENTS = 2 * 256 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 64 + 3 * 64


def test_shards_gradients_and_adamw_of_one_rank_add_up_by_hand(resolve):
    resolved = resolve(1, model=TINY)
    memory = rank_memory(resolved.config, resolved.mesh, 0)
    assert ELEMENTS == 57536
    assert memory.parameters == memory.gradients == 4 * ELEMENTS
    assert memory.optimizer_state == 8 * ELEMENTS + 4 * 12  # one count of updates for each of 12 parameters
    assert memory.main_gradients == 0
    assert memory.working_set == 4 * ELEMENTS + 4 * ELEMENTS  # everything unsharded, and its gradients


@pytest.mark.parametrize(("fp32", "bytes_each"), [(True, 4), (False, 2)])
def test_gradients_of_several_micro_batches_wait_whole_in_the_dtype_of_the_reduction(resolve, fp32, bytes_each):
    training = {"global_batch_size": 8, "micro_batch_size": 1, "compute_dtype": "bfloat16"}
    resolved = resolve(4, model=TINY, training=training | {"accumulate_allreduce_grads_in_fp32": fp32})
    assert rank_memory(resolved.config, resolved.mesh, 3).main_gradients == bytes_each * ELEMENTS


def test_mindspore_shards_have_no_padding_and_its_counts_of_updates_are_no_tensors(resolve):
    resolved = resolve(7, model=TINY, training={"global_batch_size": 7})
    config = resolved.config.model_copy(update={"platform": "mindspore"})
    memory = [rank_memory(config, resolved.mesh, rank) for rank in range(7)]
    for kind, bytes_each in (("parameters", 4), ("gradients", 4), ("optimizer_state", 8)):
        assert sum(getattr(one, kind) for one in memory) == bytes_each * ELEMENTS
    padded = sum(rank_memory(resolved.config, resolved.mesh, rank).parameters for rank in range(7))
    # over 7 ranks 256 rows make 37 (3 more in all), 64 make 10 (6 more), 32 make 5 (3 more)
    assert padded == 4 * (ELEMENTS + 2 * 3 * 64 + 5 * 6 * 64 + 2 * 3 * 64 + 3 * 6)


def test_checkpointing_keeps_one_input_a_layer(resolve):
    training = {"global_batch_size": 2, "seq_length": 16, "activation_checkpointing": "full"}
    runs = FakeRuns()
    saved = []
    for layers in (4, 5):
        resolved = resolve(1, model={"preset": "decoder-tiny", "num_layers": layers}, training=training)
        saved.append(make_plan(resolved.config, resolved.mesh, Limits(GIB, GIB, 8), runs).worst.memory.activations)
    assert saved[1] - saved[0] == 2 * 16 * 64 * 4  # batch, tokens, width, float32


def test_pipeline_ranks_of_1f1b_hold_as_many_micro_batches_as_they_are_from_the_end(resolve):
    training = {"global_batch_size": 8, "micro_batch_size": 1, "seq_length": 16}
    resolved = resolve(4, model={"preset": "decoder-tiny"}, training=training, parallelism={"pipeline_parallel": 4})
    plan = make_plan(resolved.config, resolved.mesh, Limits(GIB, GIB, 8), FakeRuns())
    second, third = (class_of(plan, rank).memory.activations for rank in (1, 2))  # stages alike: three in flight, and two
    assert second / 3 == third / 2 > 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_every_schedule_of_torch_can_be_simulated(resolve, schedule):
    training = {"global_batch_size": 16, "micro_batch_size": 2}
    parallelism = {"pipeline_parallel": 2, "pipeline_parallel_schedule": schedule}
    resolved = resolve(2, training=training, parallelism=parallelism)
    pipeline = pipeline_of(resolved.config, resolved.mesh)
    assert pipeline is not None
    stages = pipeline.schedule.stage_count
    assert sum(step.kind.name == "FORWARD" for steps in pipeline.schedule.steps for step in steps) == 8 * stages


@pytest.mark.parametrize(("offload", "fits"), [(False, False), (True, True)])
def test_the_reported_tower_fits_cards_of_64_gb_with_offload_alone(offload, fits):
    loaded = load_config(TOWER, [Override(f"fsdp_config.enable_offload={str(offload).lower()}")])
    resolved = resolve_config(loaded, ranks=None)
    plan = make_plan(resolved.config, resolved.mesh, Limits(64 * GIB, 2048 * GIB, 8), FakeRuns())
    assert plan.fits is fits
    shards = plan.worst.memory
    # 1.0477e12 parameters over 128 ranks: 4 bytes each, 4 for gradients, 8 for AdamW
    assert shards.parameters + shards.gradients + shards.optimizer_state == pytest.approx(16 * 1.0477e12 / 128, rel=1e-3)
