"""Ranks, degrees, batch and model sizes: what fits, what is filled in, and what is refused with a way out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpcli.config import Config


@pytest.mark.parametrize(
    ("text", "given", "world_size", "shard"),
    [
        ("{}", {}, 1, 1),
        ("{}", {"ranks": 8}, 8, 8),
        ("{}", {"launcher_world_size": 4}, 4, 4),
        ("{}", {"ranks": 4, "launcher_world_size": 4}, 4, 4),
        ("launch: {ranks: 2}", {}, 2, 2),
        ("launch: {ranks: 2}", {"ranks": 4}, 4, 4),
        ("launch: {ranks: 2}", {"launcher_world_size": 8}, 8, 8),
        ("parallelism: {data_parallel_shard: 4}", {}, 4, 4),
        ("parallelism: {data_parallel_replicate: 2, data_parallel_shard: 4}", {}, 8, 4),
        ("parallelism: {data_parallel_replicate: 2, data_parallel_shard: -1}", {"ranks": 8}, 8, 4),
        ("parallelism: {data_parallel_replicate: 2}", {}, 2, 1),
        ("parallelism: {data_parallel_shard: -1}", {"device_count": 4}, 4, 4),
        ("{}", {"device_count": 2}, 2, 2),
        ("parallelism: {data_parallel_shard: 4}", {"device_count": 2}, 4, 4),
    ],
)
def test_ranks_come_from_option_launcher_file_degrees_devices_in_this_order(
    resolve, text, given, world_size, shard
):
    resolved = resolve(text, **given)
    assert resolved.world_size == resolved.mesh.world_size == resolved.config.launch.ranks == world_size
    assert resolved.mesh.dp_shard == resolved.config.parallelism.data_parallel_shard == shard


def test_filling_without_a_number_of_ranks_says_what_to_do(problem):
    assert problem("parallelism:\n  data_parallel_shard: -1\n") == (
        "x.yaml:2: parallelism.data_parallel_shard: -1 takes the ranks that the other degrees leave, and "
        "nothing says how "
        "many ranks there are; give --ranks N, set launch.ranks, or write the number here"
    )
    on_cpu = problem("device: cpu\nparallelism: {data_parallel_shard: -1}\n", device_count=4)
    assert on_cpu.startswith("x.yaml:2: parallelism.data_parallel_shard: -1 takes")


def test_degrees_that_do_not_make_the_ranks_name_the_value_that_would(problem):
    line = problem("parallelism:\n  data_parallel_replicate: 2\n  data_parallel_shard: 3\n", ranks=8)
    assert line.startswith("x.yaml:3: parallelism.data_parallel_shard: ")
    assert "data_parallel_replicate 2 x data_parallel_shard 3 makes 6 ranks, but the run has 8" in line
    assert "data_parallel_shard: 4 (or -1) would use all 8" in line


def test_ranks_and_launcher_must_agree(problem):
    assert problem("{}", ranks=4, launcher_world_size=8) == (
        "--ranks 4: the launcher has started 8 ranks; leave --ranks out, or change the launcher's number"
    )
    assert problem("{}", ranks=0) == "--ranks 0: a run has from 1 to 1048576 ranks"


def test_batch_that_does_not_split_names_sizes_that_would(problem):
    line = problem("training:\n  global_batch_size: 10\n", ranks=4)
    assert line.startswith("x.yaml:2: training.global_batch_size: 10 is not divisible by ")
    assert "8 or 12 would work" in line
    line = problem("training:\n  global_batch_size: 12\n  micro_batch_size: 2\n", ranks=4)
    assert line.startswith("x.yaml:3: training.micro_batch_size: 2 does not divide the 3 sequences")
    assert line.endswith("values that would work: 1, 3")


def test_a_default_that_does_not_fit_is_said_to_be_one(problem):
    line = problem("{}", ranks=3)
    assert line.startswith("x.yaml: training.global_batch_size: 8 is not divisible by ")
    assert line.endswith(" (not set in the file: the value is the default)")


def test_micro_batch_left_out_is_the_whole_share(resolve):
    assert resolve("training: {global_batch_size: 24}", ranks=4).config.training.micro_batch_size == 6
    assert (
        resolve(
            "training: {global_batch_size: 24, micro_batch_size: 2}", ranks=4
        ).config.training.micro_batch_size
        == 2
    )


def test_sizes_come_from_the_preset_where_the_file_has_none(resolve):
    model = resolve("model: {preset: decoder-small, num_layers: 7}").config.model
    assert (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.ffn_size) == (
        128,
        7,
        8,
        4,
        512,
    )
    assert (model.vocab_size, model.rope_theta, model.norm_eps, model.tie_embeddings) == (
        256,
        10_000.0,
        1e-5,
        False,
    )


def test_heads_must_divide(problems):
    assert problems("model:\n  num_heads: 6\n  num_kv_heads: 4\n") == [
        (
            "x.yaml:1: model.hidden_size: 64 is not divisible by num_heads 6; 60 or 66 would work, or change "
            "num_heads "
            "(not set in the file: the value is that of decoder-tiny)"
        ),
        "x.yaml:3: model.num_kv_heads: 4 does not divide num_heads 6; values that would work: 1, 2, 3, 6",
    ]


def test_head_size_must_be_even(problem):
    assert problem("model: {hidden_size: 60, num_heads: 4, num_kv_heads: 4}") == (
        "x.yaml:1: model.hidden_size: 60 over num_heads 4 makes an odd head size, 15, and rotary embeddings "
        "turn pairs; "
        "56 or 64 would work"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("platform: mindspore", "platform: mindspore is not available in this version, which runs on torch"),
    ],
)
def test_what_this_version_cannot_do_is_said(problem, text, expected):
    assert problem(text, ranks=4) == f"x.yaml:1: {expected}"


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("parallelism: {tensor_parallel: 3}", 3, "model.num_heads: 4 is not divisible by tensor_parallel 3"),
        ("parallelism: {expert_parallel: 2}", 2, "parallelism.expert_parallel: 2 has no experts to spread"),
        (
            "model: {preset: moe-tiny}\nparallelism: {expert_parallel: 3}",
            3,
            "model.num_experts: 8 is not divisible by expert_parallel 3",
        ),
        (
            "parallelism: {pipeline_parallel: 2}",
            2,
            "training.micro_batch_size: makes 1 micro-batch a step, and 1f1b over 2 pipeline ranks needs at least 2",
        ),
        (
            "{training: {micro_batch_size: 1, global_batch_size: 5}, "
            + "parallelism: {pipeline_parallel: 2, pipeline_parallel_schedule: interleaved_1f1b}}",
            2,
            "training.micro_batch_size: makes 5 micro-batches a step, and interleaved_1f1b runs them in 2 rounds",
        ),
        (
            "training: {seq_length: 15}\nparallelism: {tensor_parallel: 2, sequence_parallel: true}",
            2,
            "training.seq_length: 15 is not divisible by tensor_parallel 2",
        ),
        ("model: {preset: decoder-tiny, kv_lora_rank: 8}", 1, "model.kv_lora_rank: has no effect: it belongs to attention: mla"),
        ("model: {preset: mla-tiny, qk_rope_head_dim: 7}", 1, "model.qk_rope_head_dim: 7 is odd"),
        ("model: {preset: moe-tiny, experts_per_token: 9}", 1, "model.experts_per_token: 9 is more than there are experts"),
        ("model: {preset: moe-tiny, first_dense_layers: 4}", 1, "model.first_dense_layers: 4 leaves no layer"),
    ],
)
def test_layouts_and_models_that_cannot_be_are_refused(problems, text, ranks, expected):
    assert any(expected in line for line in problems(text, ranks=ranks))


def test_a_part_that_the_preset_lacks_gets_the_sizes_of_the_preset_that_has_it(resolve):
    model = resolve("model: {preset: moe-tiny, attention: mla}").config.model
    assert (model.kv_lora_rank, model.num_experts, model.num_kv_heads) == (16, 8, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "parallelism: {sequence_parallel: true}",
            (
                "parallelism.sequence_parallel: true needs tensor_parallel of at least 2: it splits the "
                "sequence over the "
                "tensor-parallel ranks"
            ),
        ),
        (
            "fsdp_config: {comm_fusion: true}",
            (
                "fsdp_config.comm_fusion: true is not a choice on torch, which always fuses; it belongs to "
                "mindspore"
            ),
        ),
        (
            "parallelism: {pipeline_parallel_schedule: zbv}\nfsdp_config: {reshard_after_forward: true}",
            (
                "fsdp_config.reshard_after_forward: true with zbv gives wrong gradients: a zero-bubble "
                "schedule "
                "needs the "
                "parameters again after they were freed; write false, or leave the key out"
            ),
        ),
        (
            "parallelism: {pipeline_parallel_interleave_num: 2}",
            (
                "parallelism.pipeline_parallel_interleave_num: 2 needs a schedule that interleaves, such as "
                "interleaved_1f1b; "
                "1f1b takes 1"
            ),
        ),
        (
            "fsdp_config: {enable_offload: true, pin_memory: true}",
            (
                "fsdp_config.pin_memory: true needs an accelerator, and this run is on the CPU; leave the "
                "key "
                "out"
            ),
        ),
        (
            "training: {loss_scale: {}}",
            "training.loss_scale: this is for compute_dtype float16, and compute_dtype is float32",
        ),
    ],
)
def test_combinations_that_are_refused(problems, text, expected):
    line = len(text.splitlines())
    assert f"x.yaml:{line}: {expected}" in problems(text, ranks=1)


def test_zero_bubble_decides_reshard_and_says_so(resolve):
    resolved = resolve(
        "parallelism: {pipeline_parallel_schedule: interleaved_zero_bubble}\nmodel: {num_layers: 4}"
    )
    assert resolved.config.fsdp_config.reshard_after_forward is False
    assert resolved.config.parallelism.pipeline_parallel_interleave_num == 2
    assert [notice.split(",")[0] for notice in resolved.notices] == [
        "fsdp_config.reshard_after_forward is false"
    ]


def test_reshard_is_left_to_the_engine_otherwise(resolve):
    resolved = resolve("{}")
    assert resolved.config.fsdp_config.reshard_after_forward is None
    assert resolved.notices == []


def test_pinning_follows_the_device(resolve):
    assert resolve("fsdp_config: {enable_offload: true}").config.fsdp_config.pin_memory is False
    assert (
        resolve("fsdp_config: {enable_offload: true}", device_count=1).config.fsdp_config.pin_memory is True
    )
    assert resolve("device: cpu", device_count=1).config.fsdp_config.pin_memory is False


def test_a_device_that_is_not_there_is_refused(problem):
    assert problem("device: cuda", device_count=0) == (
        "x.yaml:1: device: cuda: there is no such device on this machine "
        "(`hpcli doctor` shows what is missing); write auto or cpu"
    )


def test_keys_of_another_optimizer_are_noticed(resolve):
    resolved = resolve("optimizer: {name: sgd, betas: [0.9, 0.99]}")
    assert resolved.notices == [
        "optimizer.betas has no effect: it belongs to adamw, and the optimizer is sgd"
    ]


def test_text_file_must_be_there_and_long_enough(problem, resolve):
    assert (
        problem("data:\n  path: corpus.txt\n")
        == f"x.yaml:2: data.path: there is no file {Path.cwd() / 'corpus.txt'}"
    )
    Path("corpus.txt").write_bytes(b"x" * 128)
    assert problem("data: {path: corpus.txt}").endswith(
        "has 128 bytes; training.seq_length 128 needs at least 129"
    )
    Path("corpus.txt").write_bytes(b"x" * 129)
    assert resolve("data: {path: corpus.txt}").config.data.path == str(Path.cwd() / "corpus.txt")
    Path("folder").mkdir()
    assert problem("data: {path: folder}").endswith("folder is a directory, not a text file")
    assert "data.path: " in problem('data: {path: "a\\0b"}')


def test_configuration_crosses_into_other_processes_as_json(resolve):
    config = resolve(
        "training: {norm_type: -inf, max_norm: .inf}\noptimizer: {betas: [0.5, 0.75]}", ranks=2
    ).config
    again = Config.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert (again.training.norm_type, again.training.max_norm) == (-math.inf, math.inf)
    assert again == Config.model_validate_json(config.model_dump_json())
