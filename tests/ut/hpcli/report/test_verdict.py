from __future__ import annotations

import math
import struct
from types import SimpleNamespace

from hpcli.report import norm_verdict

NAN = float("nan")
OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


def test_equal_bits_agree(events: SimpleNamespace) -> None:
    assert norm_verdict(events.rows(8)) == (True, "8 of 8 ranks hold 0.776062, bit for bit")


def test_a_single_rank_agrees_with_itself(events: SimpleNamespace) -> None:
    assert norm_verdict(events.rows(1)) == (True, "1 of 1 rank holds 0.776062, bit for bit")


def test_disagreement_names_the_ranks_and_the_exact_values(events: SimpleNamespace) -> None:
    agree, text = norm_verdict(events.rows(6, norm=0.5, odd={4: 0.75}))
    assert not agree
    assert text == (
        "DISAGREE: ranks 0-3, 5 hold 0.5 (0x1.0000000000000p-1); rank 4 holds 0.75 (0x1.8000000000000p-1)"
    )


def test_one_bit_is_a_disagreement_and_shows_in_the_digits(events: SimpleNamespace) -> None:
    next_one = math.nextafter(0.776062, 1)
    agree, text = norm_verdict(events.rows(2, odd={1: next_one}))
    assert not agree
    assert "rank 0 holds 0.776062 (" in text
    assert "rank 1 holds 0.7760620000000001 (" in text
    assert (0.776062).hex() in text and next_one.hex() in text


def test_the_same_nan_everywhere_agrees_and_is_said_not_to_be_finite(events: SimpleNamespace) -> None:
    assert norm_verdict(events.rows(4, norm=NAN)) == (True, "4 of 4 ranks hold nan, bit for bit (NOT FINITE)")
    assert norm_verdict(events.rows(4, norm=math.inf))[1] == "4 of 4 ranks hold inf, bit for bit (NOT FINITE)"


def test_nans_of_different_bits_disagree(events: SimpleNamespace) -> None:
    agree, text = norm_verdict(events.rows(2, norm=NAN, odd={1: OTHER_NAN}))
    assert not agree
    assert "0x7ff8000000000001" in text


def test_zeros_of_different_sign_disagree(events: SimpleNamespace) -> None:
    agree, text = norm_verdict(events.rows(2, norm=0.0, odd={1: -0.0}))
    assert not agree
    assert "rank 1 holds -0 (" in text


def test_a_rank_without_a_norm_agrees_with_nobody(events: SimpleNamespace) -> None:
    agree, text = norm_verdict(events.rows(3, odd={2: None}))
    assert not agree
    assert text.endswith("rank 2 holds no norm")
    assert not norm_verdict(events.rows(2, norm=None))[0]
    assert norm_verdict([]) == (False, "DISAGREE: no rank reported a norm")


def test_many_values_are_summed_up(events: SimpleNamespace) -> None:
    agree, text = norm_verdict(events.rows(1000, odd={rank: float(rank) for rank in range(100, 900)}))
    assert not agree
    assert "ranks 0-99, 900-999 hold 0.776062" in text
    assert text.endswith("793 more ranks hold 793 other values")
    assert len(text) < 1000
