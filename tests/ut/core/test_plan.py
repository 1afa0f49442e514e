"""What a plan says about a parameter, by its name alone."""

from __future__ import annotations

import pytest

from hyper_parallel.core.plan import ParallelPlan, matching

PLAN = ParallelPlan(
    layers=("layers.0", "layers.1"),
    tensor_split={"embedding.weight": 0, "layers.*.ffn.down.weight": 1, "layers.*.ffn.*": 0},
    regions=("layers.*.ffn",),
    embedding="embedding",
    head="head",
    experts=("layers.*.moe.experts",),
    sequence_parallel=True,
    whole_sequence=("vision", "embedding"),
)


def test_the_first_pattern_that_matches_decides():
    assert PLAN.tensor_dim("layers.0.ffn.down.weight") == 1
    assert PLAN.tensor_dim("layers.0.ffn.up.weight") == 0
    assert PLAN.tensor_dim("layers.10.ffn.up.weight") == 0
    assert PLAN.tensor_dim("layers.0.norm.weight") is None
    assert matching({}, "layers.0.ffn.up.weight") is None


@pytest.mark.parametrize(
    ("parameter", "inside"),
    [
        ("layers.0.ffn.up.weight", True),
        ("layers.0.ffn.norm.weight", True),
        ("layers.0.ffn_norm.weight", False),  # a name that only begins alike
        ("head.weight", True),
        ("header.weight", False),
        ("embedding.weight", False),
    ],
)
def test_what_lies_in_a_region(parameter, inside):
    assert PLAN.in_region(parameter) is inside


def test_a_plan_without_a_head_has_no_region_for_it():
    assert not ParallelPlan(layers=()).in_region("head.weight")
    assert not ParallelPlan(layers=()).in_region(".weight")


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("layers.0.ffn_norm", False),
        ("layers.0.ffn_norm.weight", False),
        ("vision", True),
        ("vision.layers.0.ffn_norm.weight", True),
        ("visionary.weight", False),
        ("embedding", True),
    ],
)
def test_what_comes_before_the_sequence_is_split(name, whole):
    assert PLAN.sees_whole_sequence(name) is whole


def test_without_sequence_parallelism_everything_sees_the_whole_sequence():
    assert ParallelPlan(layers=()).sees_whole_sequence("layers.0.ffn_norm")


def test_experts_are_those_that_the_plan_names():
    assert PLAN.is_expert("layers.1.moe.experts.up")
    assert not PLAN.is_expert("layers.1.moe.router.weight")
    assert not PLAN.is_expert("layers.1.moe.shared.up.weight")
