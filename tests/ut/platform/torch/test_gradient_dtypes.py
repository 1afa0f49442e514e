"""Gradients of several dtypes and devices in one list, and the first part of issue-64."""

from __future__ import annotations

import math

import pytest
import torch

from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_, grad_norm_report
from hyper_parallel.platform.torch.grad_norm import arrangement


@pytest.fixture
def scaled_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of (gradients, coefficient) of every in-place multiplication by a group's coefficient."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    original = torch._foreach_mul_

    def spy(tensors: list[torch.Tensor], coefficient: torch.Tensor) -> None:
        seen.extend((tensor.dtype, coefficient.dtype) for tensor in tensors)
        original(tensors, coefficient)

    monkeypatch.setattr(torch, "_foreach_mul_", spy)
    return seen


def test_issue_64_the_reported_script(scaled_by):
    param_fp32 = torch.nn.Parameter(torch.randn(4, 4))
    param_fp32.main_grad = torch.full((4, 4), 3.0)  # fp32

    param_fp16 = torch.nn.Parameter(torch.randn(4, 4))
    param_fp16.grad_dtype = None  # since torch 2.11 a gradient must otherwise have its parameter's dtype
    param_fp16.grad = torch.full((4, 4), 4.0).half()  # fp16

    norm = clip_grad_norm_([param_fp32, param_fp16], max_norm=1.0)

    assert norm.item() == 20.0  # sqrt(16 * 9 + 16 * 16)
    assert norm.dtype == torch.float32
    assert set(scaled_by) == {(torch.float32, torch.float32), (torch.float16, torch.float16)}
    torch.testing.assert_close(param_fp32.main_grad, torch.full((4, 4), 0.15), rtol=1e-6, atol=0)
    assert param_fp16.grad.dtype == torch.float16
    torch.testing.assert_close(param_fp16.grad, torch.full((4, 4), 0.2).half(), rtol=1e-3, atol=0)


def test_issue_64_with_the_gradients_of_the_report():
    torch.manual_seed(0)
    first, second = torch.randn(4, 4), torch.randn(4, 4).half()
    param_fp32, param_fp16 = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    param_fp32.main_grad = first.clone()
    param_fp16.grad_dtype = None
    param_fp16.grad = second.clone()
    expected = math.sqrt(first.double().square().sum() + second.double().square().sum())
    assert clip_grad_norm_([param_fp32, param_fp16], max_norm=1.0).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("foreach", [True, False])
def test_the_coefficient_has_the_dtype_of_each_group(foreach, parameter, monkeypatch):
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    listed = [parameter([2.0], dtype) for dtype in dtypes]
    coefficients: list[torch.Tensor] = []
    original = arrangement._scalar_like

    def spy(tensor: torch.Tensor, value: float) -> torch.Tensor:
        coefficients.append(original(tensor, value))
        assert (coefficients[-1].dtype, coefficients[-1].device) == (tensor.dtype, tensor.device)
        return coefficients[-1]

    monkeypatch.setattr(arrangement, "_scalar_like", spy)
    norm = clip_grad_norm_(listed, 1.0, foreach=foreach)
    assert norm.item() == pytest.approx(4.0, rel=1e-7)
    assert norm.dtype == torch.float64
    assert {coefficient.dtype for coefficient in coefficients} == set(dtypes)
    assert all(p.grad.item() == pytest.approx(0.5, rel=1e-5) for p in listed)


@pytest.mark.parametrize(
    ("values", "norm"),
    [([5000.0], 5000.0), ([300.0, 400.0], 500.0), ([256.0], 256.0), ([6e4, 6e4], 6e4 * math.sqrt(2))],
)
def test_float16_squares_do_not_overflow(values, norm, parameter):
    p = parameter(values, torch.float16)
    measured = clip_grad_norm_([p], 1.0)
    assert measured.dtype == torch.float32
    assert measured.item() == pytest.approx(torch.tensor(values).half().double().norm().item(), rel=1e-7)
    assert measured.item() == pytest.approx(norm, rel=1e-3)
    assert p.grad.double().norm().item() == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("cuts", [(12,), (6, 6), (3, 9), (1,) * 12, (5, 4, 3)])
def test_a_bfloat16_norm_does_not_depend_on_how_gradients_are_grouped(cuts, parameter):
    """In bfloat16 the same twelve tensors give 28.5 or 28.375, depending on the groups."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(12, 68, generator=generator).bfloat16()
    exact = data.double().norm().item()
    norm = clip_grad_norm_([parameter(part.clone()) for part in data.split(cuts)], 1e9)
    assert norm.dtype == torch.float32
    assert norm.item() == torch.tensor(exact, dtype=torch.float32).item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_float32_or_float64_and_never_narrower(norm_type, parameter):
    low = [parameter([3.0], torch.bfloat16), parameter([4.0], torch.float16)]
    assert clip_grad_norm_(low, 10, norm_type).dtype == torch.float32
    assert clip_grad_norm_([*low, parameter([1.0], torch.float64)], 10, norm_type).dtype == torch.float64


def test_a_norm_that_bfloat16_would_round(parameter):
    # 705.3 would become 704 in bfloat16
    assert clip_grad_norm_([parameter([700.0, 86.5], torch.bfloat16)], 1e9).item() == pytest.approx(705.3241, rel=1e-6)


def test_a_gradient_that_changes_its_dtype_between_steps(parameter):
    p = parameter([3.0, 4.0])
    p.main_grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([p], 10).dtype == torch.float32
    p.main_grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clip_grad_norm_([p], 10).dtype == torch.float64
    p.main_grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    assert clip_grad_norm_([p], 10).dtype == torch.float32


def views_of_one_buffer(buffer: torch.Tensor, sizes: list[int]) -> list[torch.nn.Parameter]:
    listed = []
    offset = 0
    for size in sizes:
        p = torch.nn.Parameter(torch.zeros(size))
        p.main_grad = buffer[offset : offset + size]
        listed.append(p)
        offset += size
    return listed


def test_main_grads_that_tile_one_buffer_are_read_and_scaled_once():
    buffer = torch.tensor([1.0, 2.0, 3.0, 4.0])
    listed = views_of_one_buffer(buffer, [1, 3])
    assert clip_grad_norm_(listed, 1.0).item() == pytest.approx(math.sqrt(30), rel=1e-7)
    torch.testing.assert_close(buffer, torch.tensor([1.0, 2.0, 3.0, 4.0]) / math.sqrt(30), rtol=1e-6, atol=0)


def test_a_foreign_gradient_in_the_same_buffer_is_neither_counted_nor_scaled():
    buffer = torch.tensor([3.0, 4.0, 0.0, 0.0])
    listed = views_of_one_buffer(buffer, [1, 1])
    assert clip_grad_norm_(listed, 100).item() == 5.0  # what lies beside them is zero
    buffer[3] = 12.0
    assert clip_grad_norm_(listed, 1.0).item() == 5.0
    torch.testing.assert_close(buffer, torch.tensor([0.6, 0.8, 0.0, 12.0]), rtol=1e-6, atol=0)
    buffer[2] = math.nan
    assert clip_grad_norm_(listed, 100).item() == pytest.approx(1.0, rel=1e-6)


def test_the_zeros_between_gradients_do_not_make_the_minimum():
    listed = views_of_one_buffer(torch.tensor([3.0, 4.0, 0.0]), [1, 1])
    assert clip_grad_norm_(listed, 100, -math.inf).item() == 3.0


def test_gradients_that_overlap_are_not_taken_for_a_buffer():
    buffer = torch.tensor([3.0, 4.0, 12.0])
    listed = views_of_one_buffer(buffer, [2, 1])
    listed[1].main_grad = buffer[1:2]
    assert grad_norm_report(listed).norm.item() == pytest.approx(math.sqrt(9 + 16 + 16), rel=1e-7)
