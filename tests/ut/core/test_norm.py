"""What a norm is: plain float64 arithmetic over parts."""

from __future__ import annotations

import math
import random
import struct

import pytest

from hyper_parallel.core.norm import (
    LARGEST_FLOAT32,
    check_max_norm,
    clip_coefficient,
    combine,
    identity,
    parse_norm_type,
)

EVERY_P = [2.0, 1.0, 3.0, 0.5, math.inf, -math.inf, 0.0]


@pytest.mark.parametrize(
    ("p", "whole"),
    [(2, 5.0), (1, 7.0), (3, 91 ** (1 / 3)), (0.5, (3**0.5 + 2) ** 2), (math.inf, 4.0), (-math.inf, 3.0), (0, 7.0)],
)
def test_parts_3_and_4(p, whole):
    assert combine([3.0, 4.0], p) == pytest.approx(whole, rel=1e-15)


def test_norms_of_ranks_are_neither_averaged_nor_maximised():
    # squares 20 and 100 on two ranks: 10.954452, while the mean of the norms is 7.236068
    assert combine([math.sqrt(20), math.sqrt(100)], 2) == pytest.approx(10.954451150103322, rel=1e-15)
    assert combine([math.sqrt(n) for n in (5, 25, 61, 113)], 2) == pytest.approx(14.2828569, rel=1e-8)


@pytest.mark.parametrize("p", EVERY_P)
def test_the_part_of_nothing_changes_nothing(p):
    assert combine([], p) == identity(p)
    assert combine([identity(p), 3.0, identity(p)], p) == 3.0
    assert combine([identity(p)] * 2, p) == identity(p)


@pytest.mark.parametrize("p", EVERY_P)
def test_one_part_is_the_whole_bit_for_bit(p):
    assert combine([0.1], p) == 0.1


@pytest.mark.parametrize("p", EVERY_P)
def test_nan_anywhere_is_nan(p):
    assert math.isnan(combine([1.0, math.nan, math.inf], p))


@pytest.mark.parametrize(("p", "whole"), [(2, math.inf), (1, math.inf), (math.inf, math.inf), (-math.inf, 1.0)])
def test_infinite_parts(p, whole):
    assert combine([1.0, math.inf], p) == whole


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-25, 1e20, 1e200, 1e300])
@pytest.mark.parametrize("p", [0.5, 1, 2, 3, 17])
def test_no_intermediate_overflows_or_underflows(p, scale):
    assert combine([3 * scale, 4 * scale], p) / scale == pytest.approx(combine([3.0, 4.0], p), rel=1e-12)


def test_a_result_beyond_float64_is_infinite():
    assert combine([1e308] * 100, 1) == math.inf
    assert combine([1.0] * 10**5, 0.01) == math.inf  # (1e5) ** 100


@pytest.mark.parametrize("p", EVERY_P)
def test_the_order_of_the_parts_changes_no_bit(p):
    draw = random.Random(0)
    parts = [draw.lognormvariate(0, 8) for _ in range(100)]
    first = struct.pack("d", combine(parts, p))
    for _ in range(20):
        draw.shuffle(parts)
        assert struct.pack("d", combine(parts, p)) == first


@pytest.mark.parametrize("p", EVERY_P)
def test_parts_of_parts_combine_by_the_same_rule(p):
    parts = [float(n) for n in range(1, 13)]
    nested = combine([combine(parts[:5], p), combine(parts[5:6], p), combine(parts[6:], p)], p)
    assert nested == pytest.approx(combine(parts, p), rel=1e-15)


@pytest.mark.parametrize(
    ("written", "p"),
    [(2, 2.0), (0, 0.0), ("2", 2.0), ("2.5", 2.5), ("inf", math.inf), ("-inf", -math.inf), (" 1 ", 1.0)],
)
def test_norm_types_as_numbers_and_strings(written, p):
    assert parse_norm_type(written) == p


@pytest.mark.parametrize("written", [-1, -0.5, "-2", math.nan, "nan", "two", "", None, [2]])
def test_what_is_no_norm_type_is_refused(written):
    with pytest.raises(ValueError, match="norm_type must be a number >= 0, inf or -inf, not"):
        parse_norm_type(written)


@pytest.mark.parametrize("max_norm", [-1, -1e-30, -math.inf, math.nan])
def test_a_negative_or_nan_bound_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm must be a number >= 0"):
        check_max_norm(max_norm)


def test_the_coefficient_is_torchs_and_never_above_one():
    assert check_max_norm("2") == 2.0
    assert clip_coefficient(5.0, 1.0) == 1.0 / (5.0 + 1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(5.0, 0.0) == 0.0
    assert clip_coefficient(5.0, math.inf) == 1.0
    assert clip_coefficient(0.0, 0.0) == 0.0


def test_largest_float32_is_where_rounding_gives_infinity():
    def rounded(value: float) -> float:
        try:
            return struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            return math.inf

    assert rounded(LARGEST_FLOAT32) == math.inf
    assert rounded(math.nextafter(LARGEST_FLOAT32, 0)) == 2.0**128 - 2.0**104
