"""Many ranks take no longer than few: every class of ranks is worked out once."""

from __future__ import annotations

import time

import pytest

from hpcli.plan.activations import FakeRuns
from hpcli.plan.communication import traffic
from hpcli.plan.estimate import Limits, class_of, make_plan

MODEL = {"preset": "decoder-small", "hidden_size": 8192, "num_layers": 128, "num_heads": 64, "num_kv_heads": 8, "ffn_size": 28672}
LAYOUT = {"tensor_parallel": 8, "pipeline_parallel": 16, "sequence_parallel": True}


@pytest.mark.parametrize(("ranks", "seconds"), [(8192, 60), (131072, 120)])
def test_a_pipeline_over_that_many_ranks_is_planned_in_time(resolve, ranks, seconds):
    shards = ranks // 128
    training = {"global_batch_size": 16 * shards, "micro_batch_size": 1, "seq_length": 4096, "activation_checkpointing": "full"}
    resolved = resolve(ranks, model=MODEL, training=training, parallelism={**LAYOUT, "data_parallel_shard": shards})
    began = time.monotonic()
    runs = FakeRuns()
    plan = make_plan(resolved.config, resolved.mesh, Limits(64 * 2**30, 2**41, 8), runs)
    sent = traffic(resolved.config, resolved.mesh, ranks - 1, plan.pipeline, runs)
    assert time.monotonic() - began < seconds
    assert sum(needs.ranks.ranks for needs in plan.classes) == ranks
    (norm,) = [one for one in sent if one.purpose == "gradient norm"]
    assert (norm.times, norm.bytes) == (1, 96 * ranks)  # twelve float64 of each rank
    assert class_of(plan, 0).memory.activations > class_of(plan, ranks - 1).memory.activations  # 16 in flight, and 1
