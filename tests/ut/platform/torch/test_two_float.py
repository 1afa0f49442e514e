"""Norms on devices without float64, which the CPU plays here: no float64 tensor, and the same accuracy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_
from hyper_parallel.platform.torch.grad_norm import two_float
from hyper_parallel.platform.torch.grad_norm.local import norm_of_flat, norm_of_many

SIZES = [1, 2, 3, 255, 4096, 65_536, 65_537, 262_145, 1_000_003]


class NoFloat64(TorchDispatchMode):
    """Fails where an operation makes a float64 tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        wide = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dtype == torch.float64]
        assert not wide, f"{func} made a float64 tensor"
        return out


@pytest.fixture(autouse=True)
def without_float64(monkeypatch):
    monkeypatch.setattr(two_float, "WITHOUT_FLOAT64", {"cpu"})


def drawn(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    values = {
        "normal": lambda: rng.standard_normal(size),
        "equal": lambda: np.full(size, 0.1),  # rounding errors do not cancel
        "positive": lambda: rng.random(size) + 0.5,
        "one large": lambda: np.where(np.arange(size) == size // 3, 1e6, 1e-6),
        "log-normal": lambda: rng.lognormal(0, 3, size),
    }[kind]()
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "equal", "positive", "one large", "log-normal"])
@pytest.mark.parametrize("size", SIZES)
def test_norms_are_as_accurate_as_with_float64(kind, size):
    values = drawn(kind, size)
    wide = np.abs(values.astype(np.float64))
    with NoFloat64():
        measured = {p: norm_of_flat(torch.from_numpy(values), p) for p in (2.0, 1.0, 0.0, math.inf, -math.inf)}
    assert measured[2.0] == pytest.approx(math.sqrt(math.fsum(wide * wide)), rel=1e-7)
    assert measured[1.0] == pytest.approx(math.fsum(wide), rel=1e-7)
    assert [measured[p] for p in (0.0, math.inf, -math.inf)] == [np.count_nonzero(wide), wide.max(), wide.min()]


@pytest.mark.parametrize("magnitude", [1e-37, 1e-25, 1e-13, 1e6, 1e20, 3e37])
def test_magnitudes_whose_squares_leave_float32(magnitude):
    values = (np.random.default_rng(0).standard_normal(1000) * magnitude).astype(np.float32)
    expected = magnitude * math.sqrt(math.fsum((values.astype(np.float64) / magnitude) ** 2))
    assert two_float.norm(torch.from_numpy(values), 2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", [1, 2])
def test_values_that_are_not_finite_stay_so(bad, p):
    for values in ([1.0, bad], [bad, 1.0], [bad, bad, 0.0]):
        assert two_float.norm(torch.tensor(values), p) == pytest.approx(bad, nan_ok=True)


def test_nothing_and_zeros_are_zero():
    assert two_float.norm(torch.zeros(0), 2) == two_float.norm(torch.zeros(5), 2) == two_float.norm(torch.zeros(1), 1) == 0.0


def test_a_sum_keeps_what_one_float32_loses():
    high, low = two_float.total(torch.tensor([1.0, *[2.0**-24] * 8]), torch.zeros(9))
    assert float(high) + float(low) == 1.0 + 2.0**-21  # one by one, each addition would round to 1


def test_squares_are_exact():
    x = torch.tensor([1.0 + 2.0**-23, 3.1415927, 1e-3])
    high, low = two_float.square(x)
    assert [float(h) + float(s) for h, s in zip(high, low, strict=True)] == [float(v) ** 2 for v in x]


def test_half_precision_and_many_small_tensors():
    parts = [torch.full((n,), 0.1, dtype=torch.bfloat16) for n in (1, 7, 100, 40_000)]
    value = float(torch.tensor(0.1, dtype=torch.bfloat16))
    with NoFloat64():
        assert norm_of_many(parts, 2) == pytest.approx(value * math.sqrt(40_108), rel=1e-7)


def test_other_orders_are_computed_on_the_host():
    values = torch.arange(1.0, 12.0)
    assert norm_of_flat(values, 3) == pytest.approx(sum(n**3 for n in range(1, 12)) ** (1 / 3), rel=1e-12)
    assert norm_of_flat(values, 0.5) == pytest.approx(sum(n**0.5 for n in range(1, 12)) ** 2, rel=1e-12)


def test_the_clip_makes_no_float64_tensor(parameter):
    p, q = parameter([3.0, 0.0]), parameter([0.0, 4.0])
    with NoFloat64():
        norm = clip_grad_norm_([p, q], 1.0)
    assert (norm.item(), norm.dtype) == (5.0, torch.float32)
    assert p.grad.tolist() == [pytest.approx(0.6), 0.0]
