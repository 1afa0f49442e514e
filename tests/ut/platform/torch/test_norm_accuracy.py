"""The norm is within 1e-7 of NumPy's float64 norm of the same gradients, at any size, magnitude and distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_, get_total_norm
from hyper_parallel.platform.torch.grad_norm.local import norm_of_flat

BOUND = 1e-7
SIZES = [1, 255, 256, 257, 65_535, 65_536, 65_537, 65_793, 262_144, 262_145, 1_000_000]

DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.standard_normal(n, np.float32),
    "log-normal": lambda rng, n: rng.lognormal(0, 3, n),
    "positive": lambda rng, n: rng.random(n, np.float32) + np.float32(0.5),
    "one large": lambda rng, n: np.where(np.arange(n) == n // 3, 1e6, 1e-6),
    "mostly zero": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 1e-4),
}


def float64_norm(values: np.ndarray, p: float = 2.0) -> float:
    wide = np.abs(values.astype(np.float64))
    largest = wide.max()
    if p == 2.0:
        return float(largest * np.sqrt(np.sum(np.square(wide / largest)))) if largest else 0.0
    return float(largest * np.sum((wide / largest) ** p) ** (1 / p)) if largest else 0.0


def relative_error(values: np.ndarray, p: float = 2.0) -> float:
    expected = float64_norm(values, p)
    # in float64, since the rounding of what is returned could hide an error of half its size
    measured = norm_of_flat(torch.from_numpy(values), p)
    returned = get_total_norm([torch.from_numpy(values)], p).item()
    assert returned == np.float32(measured)
    return abs(measured / expected - 1) if expected else abs(measured)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_sizes_around_every_boundary(kind, size):
    values = DISTRIBUTIONS[kind](np.random.default_rng(size), size).astype(np.float32)
    assert relative_error(values) < BOUND


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-25, 1e-19, 1e-13, 1e-6, 1e6, 1e18, 1e20, 1e32])
@pytest.mark.parametrize("size", [100, 65_537, 300_000])
def test_magnitudes_whose_squares_leave_float32(size, magnitude):
    values = (np.random.default_rng(0).standard_normal(size) * magnitude).astype(np.float32)
    assert relative_error(values) < BOUND


def test_very_large_and_very_small_rows_in_one_tensor():
    rng = np.random.default_rng(0)
    exponents = np.repeat(rng.integers(-40, 34, 1200), 256)
    values = (rng.standard_normal(len(exponents)) * 10.0**exponents).astype(np.float32)
    assert relative_error(values) < BOUND
    assert relative_error(np.minimum(np.abs(values), np.float32(1e-14))) < BOUND


@pytest.mark.parametrize("p", [1.0, 0.5, 3.0, 7.5])
@pytest.mark.parametrize("magnitude", [1e-25, 1.0, 1e20])
def test_other_orders(p, magnitude):
    values = (np.random.default_rng(0).standard_normal(300_001) * magnitude).astype(np.float32)
    assert relative_error(values, p) < BOUND


@pytest.mark.parametrize("value", [0.1, 1.0, 1.3717, 2.310673952102661, 3.3, 1e-3])
def test_equal_elements_whose_rounding_errors_all_point_one_way(value):
    assert relative_error(np.full(1_000_000, value, np.float32)) < BOUND
    random = np.random.default_rng(0).standard_normal(1_000_000, np.float32)
    assert relative_error(np.concatenate([np.full(500_000, value, np.float32), random * np.float32(value)])) < BOUND
    assert relative_error(np.concatenate([random, np.full(256, 1e5 * value, np.float32), random])) < BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1000, 300_001])
def test_other_dtypes(dtype, size):
    g = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = float64_norm(g.double().numpy())
    assert get_total_norm([g]).double().item() == pytest.approx(exact, rel=BOUND)


def test_many_small_gradients():
    generator = torch.Generator().manual_seed(0)
    listed = [torch.randn(n % 700 + 1, generator=generator) for n in range(3000)]
    exact = float64_norm(torch.cat(listed).numpy())
    assert get_total_norm(listed).item() == pytest.approx(exact, rel=BOUND)


def test_one_hundred_million_elements():
    """Stock torch is 1 % off here, one long float32 sum."""
    half = 50_000_000
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.empty(2, half))
    p.grad = torch.empty(2, half)
    p.grad[0].uniform_(generator=generator)
    p.grad[1].normal_(generator=generator)
    flat = p.grad.view(-1).numpy()
    exact = math.sqrt(math.fsum(float(np.square(part, dtype=np.float64).sum()) for part in np.split(flat, 100)))
    assert clip_grad_norm_([p], math.inf).item() == pytest.approx(exact, rel=BOUND)
