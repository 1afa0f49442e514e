"""Optimizers, products and cross entropy on MindSpore, beside torch's numbers."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "name, options",
    [
        ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
        ("AdamW", {"weight_decay": 0.0}),
        ("SGD", {"weight_decay": 0.1}),
    ],
)
def test_optimizers_compute_what_torchs_do(on_ranks, name, options):
    (told,) = on_ranks("ms_single_programs:optimizers", 1, name=name, steps=5, **options)
    assert told["difference"] < 5e-7
    assert told["moved"] > 0.1


def test_an_optimizer_that_does_nothing_is_found_out(on_ranks):
    (told,) = on_ranks("ms_single_programs:optimizer_guard", 1)
    assert told["mint.optim.Adam"].startswith(
        "IneffectiveOptimizerError: the optimizer step returned and left weight as it was, with a gradient of up to 1. mint.optim.Adam"
    )
    assert told["SGD"] == "changed"
    assert told["bfloat16"].startswith("weight is BFloat16; optimizer state and master weights are float32")
    assert told["none"] == "the optimizer was given no parameter to train"


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.0), ("float32", 2e-6)])
def test_products_and_their_gradients_are_torchs(on_ranks, dtype, tolerance):
    (told,) = on_ranks("ms_single_programs:products", 1, dtype=dtype)
    assert {name: values for name, values in told.items() if max(values.values()) > tolerance} == {}


def test_cross_entropy_over_parts_of_the_vocabulary(on_ranks):
    for told in on_ranks("ms_single_programs:cross_entropy_parts", 2):
        assert max(told.values()) < 1e-6, told
