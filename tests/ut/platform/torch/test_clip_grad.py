"""``clip_grad_norm_`` in one process: a drop-in for torch's, with the differences that its documentation names."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import utils as torch_utils

import hyper_parallel
from hyper_parallel.platform.torch.clip_grad import (
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
    grad_norm_report,
)
from hyper_parallel.platform.torch.grad_norm.combine import NonFiniteNormError

FINITE_AND_INFINITE = [2.0, 1.0, 3.0, 0.5, 1.5, 10, math.inf, -math.inf, "inf", "-inf", "2"]


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model(torch.randn(4, 7)).square().sum().backward()
    return model


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", FINITE_AND_INFINITE)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_norm_and_clipped_gradients_are_torchs(norm_type, max_norm, foreach):
    ours, theirs = small_model(), small_model()
    norm = clip_grad_norm_(ours.parameters(), max_norm, norm_type, False, foreach)
    expected = torch_utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type, False, foreach)
    assert norm.shape == expected.shape == ()
    assert norm.dtype == expected.dtype
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm_type", FINITE_AND_INFINITE)
def test_the_two_halves_are_torchs(norm_type):
    ours, theirs = small_model(), small_model()
    norm = get_total_norm(gradients(ours), norm_type)
    expected = torch_utils.get_total_norm(gradients(theirs), norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    clip_grads_with_norm_(ours.parameters(), 0.1, norm)
    torch_utils.clip_grads_with_norm_(theirs.parameters(), 0.1, expected)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model,
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: tuple(model.parameters()),
        lambda model: dict(model.named_parameters()).values(),
        lambda model: (p for p in model.parameters()),
    ],
    ids=["module", "parameters()", "list", "tuple", "dict values", "generator"],
)
@pytest.mark.parametrize("entry", [clip_grad_norm_, hyper_parallel.clip_grad_norm_])
def test_a_module_and_any_iterable_are_clipped(entry, given):
    model = small_model()
    before = get_total_norm(gradients(model))
    norm = entry(given(model), max_norm=0.5)
    assert torch.equal(norm, before)
    assert get_total_norm(gradients(model)).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("entry", [clip_grad_norm_, hyper_parallel.clip_grad_norm_])
def test_one_tensor_is_clipped(entry, parameter):
    p = parameter([3.0, 4.0])
    assert entry(p, 1.0).item() == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)


def test_the_public_names_reach_the_same_functions(parameter):
    p = parameter([3.0, 4.0])
    assert hyper_parallel.get_total_norm(g for g in [p.grad]).item() == 5.0
    assert hyper_parallel.get_total_norm([]).item() == 0.0
    assert hyper_parallel.grad_norm_report([p]).norm.item() == 5.0
    hyper_parallel.clip_grads_with_norm_((q for q in [p]), 1.0, 5.0)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)


def test_a_parameter_listed_twice_is_counted_once_and_scaled_once(parameter):
    p = parameter([20.0, 20.0])
    assert clip_grad_norm_([p, p], 1.0).item() == pytest.approx(math.sqrt(800), rel=1e-7)  # 28.2843, not 40
    assert p.grad.norm().item() == pytest.approx(1.0, rel=1e-6)  # scaled twice it would be 0.0354


def test_a_gradient_tensor_listed_twice_is_counted_once():
    g = torch.tensor([20.0, 20.0])
    assert get_total_norm([g, g]).item() == pytest.approx(math.sqrt(800), rel=1e-7)


def test_tied_weights_of_a_module_are_counted_once():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert clip_grad_norm_(model, 10.0).item() == 5.0


def test_frozen_parameters_are_neither_counted_nor_scaled(parameter):
    frozen, free = parameter([30.0, 40.0]), parameter([3.0, 4.0])
    frozen.requires_grad_(False)
    assert clip_grad_norm_([frozen, free], 1.0).item() == 5.0
    assert frozen.grad.tolist() == [30.0, 40.0]
    frozen.requires_grad_(True)
    free.grad = torch.tensor([0.0, 0.0])
    assert clip_grad_norm_([frozen, free], 1.0).item() == 50.0


def test_main_grad_is_used_before_grad(parameter):
    p, q = parameter([30.0, 40.0]), parameter([12.0])
    p.main_grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([p, q], 1.0).item() == 13.0
    torch.testing.assert_close(p.main_grad, torch.tensor([3.0, 4.0]) / 13, rtol=1e-6, atol=0)
    assert p.grad.tolist() == [30.0, 40.0]
    torch.testing.assert_close(q.grad, torch.tensor([12.0]) / 13, rtol=1e-6, atol=0)
    p.main_grad = None
    q.grad = None
    assert clip_grad_norm_([p, q], math.inf).item() == 50.0


def test_gradients_that_are_missing_are_skipped(parameter):
    p = parameter([3.0, 4.0])
    assert clip_grad_norm_([parameter(None), p, parameter(None)], 1.0).item() == 5.0


@pytest.mark.parametrize("norm_type", [2, 1, 0, math.inf, -math.inf])
def test_no_gradients_at_all_make_zero(norm_type, parameter):
    for nothing in ([], [parameter(None)], iter([]), parameter(None)):
        norm = clip_grad_norm_(nothing, 1.0, norm_type)
        assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())


@pytest.mark.parametrize(
    ("norm_type", "expected"), [(2, 5.0), (1, 7.0), (0.5, (3**0.5 + 2) ** 2), (math.inf, 4.0), (-math.inf, 3.0), (0, 2)]
)
def test_empty_tensors_change_nothing(norm_type, expected, parameter):
    empty = parameter(torch.zeros(0, 7))
    listed = [empty, parameter([3.0, -4.0]), parameter(torch.zeros(0))]
    assert clip_grad_norm_(listed, 100, norm_type).item() == pytest.approx(expected, rel=1e-7)
    assert clip_grad_norm_([empty], 1.0, norm_type).item() == 0.0


def test_order_zero_counts_elements_and_not_tensors(parameter):
    listed = [parameter([3.0, 0.0]), parameter([-4.0, 1.0])]
    assert clip_grad_norm_(listed, 10, 0).item() == 3.0
    assert torch_utils.clip_grad_norm_(listed, 10, 0).item() == 2.0  # how many tensors have a non-zero norm


def test_zero_dimensional_parameters(parameter):
    p = parameter(torch.tensor(-3.0))
    assert clip_grad_norm_([p, parameter([4.0])], 1.0).item() == 5.0
    assert p.grad.item() == pytest.approx(-0.6, rel=1e-6)
    assert p.grad.shape == ()


def test_gradients_of_any_stride(parameter):
    p = parameter(torch.arange(12.0).view(3, 4).t())
    q = parameter(torch.arange(24.0).view(4, 6)[:, ::2])
    expected = math.sqrt(sum(n * n for n in range(12)) + sum(n * n for n in range(0, 24, 2)))
    assert clip_grad_norm_([p, q], expected / 2).item() == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(p.grad, torch.arange(12.0).view(3, 4).t() / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(q.grad, torch.arange(24.0).view(4, 6)[:, ::2] / 2, rtol=1e-6, atol=0)


def test_max_norm_zero_makes_zeros(parameter):
    p = parameter([3.0, 4.0])
    assert clip_grad_norm_([p], 0.0).item() == 5.0
    assert p.grad.tolist() == [0.0, 0.0]


def test_max_norm_infinity_writes_nothing(parameter):
    p, zero = parameter([3.0, 4.0]), parameter([0.0])
    versions = p.grad._version, zero.grad._version
    report = grad_norm_report([p, zero], math.inf)
    assert (report.norm.item(), report.clip_coefficient) == (5.0, 1.0)
    assert (p.grad._version, zero.grad._version) == versions


def test_a_norm_within_the_bound_writes_nothing(parameter):
    p = parameter([3.0, 4.0])
    version = p.grad._version
    clip_grad_norm_([p], 5.001)
    assert p.grad._version == version


@pytest.mark.parametrize("max_norm", [-1.0, -math.inf, math.nan])
def test_a_bound_that_would_flip_or_destroy_gradients_is_refused(max_norm, parameter):
    p = parameter([3.0, 4.0])
    for refused in (
        lambda: clip_grad_norm_([p], max_norm),
        lambda: clip_grads_with_norm_([p], max_norm, torch.tensor(5.0)),
    ):
        with pytest.raises(ValueError, match="max_norm"):
            refused()
    assert p.grad.tolist() == [3.0, 4.0]


def test_a_norm_type_that_is_none_is_refused(parameter):
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_([parameter([1.0])], 1.0, -2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_are_left_untouched_or_raise_by_name(bad):
    model = small_model()
    model[2].bias.grad[1] = bad
    before = copy.deepcopy(gradients(model))
    norm = clip_grad_norm_(model, 1.0)
    assert not math.isfinite(norm.item())
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(NonFiniteNormError, match=r"rank 0: 2\.bias\. Nothing was clipped") as caught:
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(RuntimeError, match="rank 0: index 3"):
        clip_grad_norm_(list(model.parameters()), 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="rank 0: index 1"):
        get_total_norm([torch.ones(2), torch.tensor([bad])], error_if_nonfinite=True)
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0, equal_nan=True)


def test_a_norm_beyond_float32_is_infinite_and_raises_when_asked(parameter):
    p = parameter([3e38, 3e38])
    assert clip_grad_norm_([p], 1.0).item() == math.inf
    assert p.grad.tolist() == torch.tensor([3e38, 3e38]).tolist()
    with pytest.raises(NonFiniteNormError, match="none alone, the norm itself overflows"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_clips_nothing_in_the_second_half_either(parameter):
    p = parameter([3.0, 4.0])
    clip_grads_with_norm_([p], 1.0, torch.tensor(math.nan))
    assert p.grad.tolist() == [3.0, 4.0]


def test_a_sparse_gradient_is_refused_with_the_cure():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient 0 is sparse; call \.to_dense\(\)"):
        clip_grad_norm_(embedding, 1.0)


def test_torch_refuses_complex_gradients_where_we_do_not_and_both_norms_agree():
    g = torch.tensor([3 + 4j, 12j])
    assert get_total_norm([g]).item() == 13.0
    assert get_total_norm([g], math.inf).item() == 12.0


def test_a_model_can_still_be_converted_in_place_after_clipping():
    """``Module.to`` swaps tensors in some modes, which torch refuses for a tensor that has a weak reference."""
    model = small_model()
    clip_grad_norm_(model, math.inf)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    norm = clip_grad_norm_(model, math.inf)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, torch_utils.get_total_norm(gradients(model)))


def test_new_parameters_at_the_addresses_of_old_ones_are_new(parameter):
    for size in (1, 2, 3, 4, 1, 3):
        listed = [parameter([1.0] * size) for _ in range(size)]
        listed[0].requires_grad_(size != 3)
        trained = size * size - (size if size == 3 else 0)
        assert clip_grad_norm_(listed, 100.0).item() == pytest.approx(math.sqrt(trained), rel=1e-7)
        del listed


def test_the_report_tells_what_was_done(parameter):
    report = grad_norm_report([parameter([3.0, 4.0]), parameter(None)], 1.0)
    assert report.clip_coefficient == pytest.approx(0.2, rel=1e-6)
    assert report.replicas_differ == ()
    (part,) = report.parts
    assert part == (0, 1, 1, 5.0, 5.0)


def test_autograd_records_nothing(parameter):
    p = parameter(torch.ones(2))
    p.grad = torch.tensor([3.0, 4.0], requires_grad=True) * 1.0
    norm = clip_grad_norm_([p], 1.0)
    assert not norm.requires_grad
    assert p.grad.grad_fn is not None  # the gradient's own history is the caller's


def test_clip_by_a_negative_norm_is_refused():
    with pytest.raises(ValueError, match="never negative"):
        clip_grads_with_norm_([torch.nn.Parameter(torch.ones(2))], 1.0, -5.0)


def test_norm_of_complex128_gradients_is_float64():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.complex128))
    parameter.grad = torch.full((4,), 1e200 + 0j, dtype=torch.complex128)
    assert clip_grad_norm_([parameter], math.inf).item() == pytest.approx(2e200)


def test_float8_gradient_is_refused_before_anything_is_scaled():
    wide, narrow = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2).to(torch.float8_e4m3fn)
    wide.grad, wide.main_grad = torch.ones(2), narrow
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        clip_grad_norm_([wide], 0.1)


def test_entry_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="entry 1 of the list is a NoneType"):
        clip_grad_norm_([torch.nn.Parameter(torch.ones(2)), None], 1.0)
