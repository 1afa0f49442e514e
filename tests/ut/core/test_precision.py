"""Which dtype holds what, and what ``reduce_dtype=None`` means."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.core.precision import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    dtype_name,
    resolve_reduce_dtype,
)


@pytest.mark.parametrize("native", ["float32", "bfloat16", "float16"])
def test_no_reduce_dtype_is_the_gradients_own_dtype_and_never_an_allocators_default(native):
    assert resolve_reduce_dtype(None, native) == native
    assert MixedPrecisionPolicy(compute_dtype=native, reduce_dtype=None).resolved_reduce_dtype == native


def test_a_given_reduce_dtype_wins_over_the_native_one():
    assert resolve_reduce_dtype("float32", "bfloat16") == "float32"
    assert MixedPrecisionPolicy("bfloat16", "bfloat16", "float32").resolved_reduce_dtype == "float32"


def test_the_native_dtype_is_that_of_compute_and_not_of_storage():
    assert MixedPrecisionPolicy("bfloat16", "float32", None).resolved_reduce_dtype == "float32"
    assert MixedPrecisionPolicy("float32", "bfloat16", None).resolved_reduce_dtype == "bfloat16"


def test_dtypes_of_a_framework_and_their_names_are_the_same():
    assert dtype_name(torch.bfloat16) == dtype_name("BFloat16") == dtype_name("bfloat16") == "bfloat16"
    policy = MixedPrecisionPolicy(torch.float32, torch.bfloat16, torch.float32)
    assert (policy.params_dtype, policy.compute_dtype, policy.reduce_dtype) == ("float32", "bfloat16", "float32")


@pytest.mark.parametrize("dtype", ["int8", "half precision", None, torch.int64])
def test_an_unknown_dtype_is_refused_with_those_that_are_known(dtype):
    with pytest.raises(ValueError, match="unknown dtype.*float32, bfloat16, float16"):
        MixedPrecisionPolicy(compute_dtype=dtype)


def test_float16_storage_is_refused():
    with pytest.raises(ValueError, match="params_dtype float16 would lose small updates"):
        MixedPrecisionPolicy(params_dtype="float16")


@pytest.mark.parametrize(
    ("params", "compute", "rounds"),
    [
        ("float32", "float32", False),
        ("float32", "bfloat16", False),
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "float32", True),
    ],
)
def test_a_second_copy_is_needed_only_where_storage_is_narrower_than_compute(params, compute, rounds):
    assert MixedPrecisionPolicy(params, compute).storage_rounds_compute is rounds


@pytest.mark.parametrize(
    ("pin_memory", "device", "pinned"),
    [(None, "cpu", False), (True, "cpu", False), (None, "cuda", True), (False, "cuda", False), (True, "npu", True)],
)
def test_offloaded_shards_are_never_pinned_without_an_accelerator(pin_memory, device, pinned):
    assert OffloadPolicy(pin_memory).pins_on(device) is pinned
