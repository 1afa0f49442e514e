"""The loss scale: halves on overflow, doubles after a quiet interval, and stays within bounds."""

from __future__ import annotations

import math

import pytest

from hyper_parallel.core.loss_scale import LARGEST_SCALE, LossScaler


def test_the_norm_is_unscaled_exactly():
    assert LossScaler(scale=1024.0).unscaled(5120.0) == 5.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_an_overflow_halves_the_scale_and_forbids_the_step(norm):
    scaler = LossScaler(scale=1024.0, steps_since_change=7)
    assert scaler.update(norm) is False
    assert (scaler.scale, scaler.steps_since_change) == (512.0, 0)


def test_the_scale_doubles_after_the_interval_and_counts_anew():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    assert [scaler.update(1.0) and scaler.scale for _ in range(7)] == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]


def test_an_overflow_starts_the_interval_anew():
    scaler = LossScaler(scale=8.0, growth_interval=2)
    for norm in (1.0, math.inf, 1.0):
        scaler.update(norm)
    assert scaler.scale == 4.0
    scaler.update(1.0)
    assert scaler.scale == 8.0


def test_the_scale_has_bounds():
    low, high = LossScaler(scale=1.0), LossScaler(scale=LARGEST_SCALE, growth_interval=1)
    low.update(math.inf)
    high.update(1.0)
    assert (low.scale, high.scale) == (1.0, LARGEST_SCALE)
