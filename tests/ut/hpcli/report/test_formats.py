from __future__ import annotations

import math

import pytest

from hpcli.report.formats import (
    coefficient_text,
    count_text,
    digits_that_tell_apart,
    duration_text,
    loss_text,
    norm_text,
    ranks_text,
    rate_text,
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, 5e-324, -1e-7, 1, None])
def test_every_float_has_a_short_text(value: float | None) -> None:
    for text_of in (loss_text, norm_text, coefficient_text, rate_text, duration_text):
        assert 0 < len(text_of(value)) < 24


def test_numbers_read_as_people_write_them() -> None:
    assert loss_text(3.21014) == "3.2101"
    assert loss_text(3.2e9) == "3.2e+09"
    assert norm_text(0.7760621) == "0.776062"
    assert coefficient_text(1.0) == "1.000"
    assert coefficient_text(0.0001234) == "0.000123"
    assert rate_text(12345.4) == "12,345 tokens/s"
    assert rate_text(0.25) == "0.25 tokens/s"
    assert [duration_text(seconds) for seconds in (0.2, 42, 62, 3723)] == ["0:00", "0:42", "1:02", "1:02:03"]
    assert count_text(1, "rank") == "1 rank"
    assert count_text(1024, "rank") == "1,024 ranks"


def test_runs_of_ranks_are_folded() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2, 3]) == "ranks 0-3, 5"
    assert ranks_text(range(0, 200, 2), most=3) == "ranks 0, 2, 4, ... (100 ranks)"


def test_digits_grow_until_the_values_differ() -> None:
    assert digits_that_tell_apart([1.0, 2.0, math.nan, None]) == 6
    assert digits_that_tell_apart([1.0, 1.00000001]) == 9
    assert digits_that_tell_apart([1.0, math.nextafter(1.0, 2)]) in (16, 17)
