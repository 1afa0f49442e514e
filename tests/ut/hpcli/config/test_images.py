"""What a vision-language model demands of its sizes and of the layout."""

from __future__ import annotations

import pytest

from hpcli.models.vlm import image_tokens


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("patch_size: 32", "model.image_height: 16 is not divisible by patch_size 32; 32 would work"),
        ("image_width: 60", "model.image_width: 60 is not divisible by patch_size 8; 56 or 64 would work"),
        ("vision_heads: 5", "model.vision_hidden_size: 32 is not divisible by vision_heads 5; 30 or 35 would work"),
        ("patch_size: 0", "model.patch_size: 0 is out of range; allowed: a whole number from 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(problem, model, expected):
    assert expected in problem(f"model: {{preset: vlm-tiny, {model}}}", ranks=1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("vision_heads: 1", "model.vision_heads: 1 is not divisible by tensor_parallel 2"),
        ("vision_ffn_size: 33", "model.vision_ffn_size: 33 is not divisible by tensor_parallel 2"),
        ("num_experts: 3", "model.num_experts: 3 is not divisible by expert_parallel 2"),
    ],
)
def test_what_the_layout_cuts_must_divide(problem, model, expected):
    layout = "parallelism: {tensor_parallel: 2, data_parallel_shard: 2, expert_parallel: 2}\n"
    experts = "" if "num_experts" in model else ", num_experts: 4"
    assert expected in problem(f"{layout}model: {{preset: vlm-tiny, {model}{experts}}}", ranks=4)


def test_the_projector_is_cut_too(problems):
    lines = problems("parallelism: {tensor_parallel: 3}\nmodel: {preset: vlm-tiny, num_heads: 4, attention: mla}", ranks=3)
    assert any("model.hidden_size: 64 is not divisible by tensor_parallel 3" in line for line in lines)


def test_an_images_positions_count_under_sequence_parallelism(problem, resolve):
    model = "model: {preset: vlm-tiny, image_width: 56, vision_heads: 4, num_kv_heads: 4}\n"
    layout = "parallelism: {tensor_parallel: 4, sequence_parallel: true}\n"
    resolved = resolve(f"{model}{layout}training: {{seq_length: 14}}")
    assert image_tokens(resolved.config.model) == 14  # 2 rows of 7; 28 positions in all
    assert problem(f"{model}{layout}training: {{seq_length: 16}}") == (
        "x.yaml:3: training.seq_length: 16, and the 14 positions of the image before it, make 30, which is not divisible by "
        "tensor_parallel 4; 14 or 18 would work, or change tensor_parallel"
    )


def test_a_decoder_has_no_images(problem):
    assert problem("model: {preset: moe-tiny, patch_size: 8}") == (
        "x.yaml:1: model.patch_size: has no effect: it belongs to the vlm presets"
    )


def test_the_text_tower_is_dense_unless_it_is_given_experts(resolve):
    assert resolve("model: {preset: vlm-tiny}").config.model.num_experts == 0
    model = resolve("model: {preset: vlm-tiny, num_experts: 8, attention: mla}").config.model
    assert (model.experts_per_token, model.expert_ffn_size, model.kv_lora_rank) == (2, 48, 16)
