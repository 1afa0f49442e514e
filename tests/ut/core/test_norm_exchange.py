"""What every rank concludes from the records of all."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hyper_parallel.core.norm_exchange import RankRecord, conclude, fingerprint, with_more


def record(contributed: float, held: float | None = None, **changed: Any) -> RankRecord:
    """A rank that holds the same list as the others, with every gradient, and counts all of it."""
    fields = {
        "contributed": contributed,
        "held": contributed if held is None else held,
        "with_gradient": 1,
        "without_gradient": 0,
        "elements": 1,
        "parameters": 11,
        "peers": 22,
        "present": 33,
        "replicas": 0,
        "float64": 0,
    }
    return RankRecord(**(fields | changed))


def test_the_norm_is_combined_from_what_counts_and_not_from_what_is_held():
    # two replicas of (3, 4), sharded over two ranks each: only the first pair counts
    records = [record(3.0), record(4.0), record(0.0, 3.0, elements=0), record(0.0, 4.0, elements=0)]
    assert conclude(records, 2).norm == 5.0


@pytest.mark.parametrize("p", [2, 1, 0, math.inf, -math.inf])
def test_no_gradient_anywhere_is_zero_also_for_the_minimum(p):
    start = math.inf if p == -math.inf else 0.0
    assert conclude([record(start, elements=0)] * 3, p).norm == 0.0


def test_a_rank_without_elements_does_not_make_the_minimum():
    assert conclude([record(math.inf, elements=0), record(3.0)], -math.inf).norm == 3.0


def test_agreement_reports_nothing():
    conclusion = conclude([record(3.0), record(4.0)], 2)
    assert conclusion == (5.0, False, (), False, (), False, False, ())


def test_the_ranks_whose_list_differs_are_the_minority():
    records = [record(1.0), record(1.0), record(1.0, parameters=12), record(1.0)]
    assert conclude(records, 2).list_differs == (2,)


def test_two_ranks_with_two_lists_differ():
    assert len(conclude([record(1.0), record(1.0, parameters=12)], 2).list_differs) == 1


def test_stages_of_a_pipeline_need_not_hold_the_same_list():
    records = [record(1.0), record(1.0), record(1.0, parameters=12, peers=23), record(1.0, parameters=12, peers=23)]
    assert conclude(records, 2).list_differs == ()


def test_an_empty_list_is_no_difference_but_its_rank_counts_nothing():
    records = [record(0.0, elements=0, parameters=0, present=44), record(1.0)]
    conclusion = conclude(records, 2)
    assert conclusion.list_differs == ()
    assert conclusion.gradients_missing


def test_a_gradient_missing_on_one_peer_is_seen():
    assert conclude([record(1.0), record(1.0, present=34)], 2).gradients_missing
    assert not conclude([record(1.0), record(1.0, present=34, peers=23)], 2).gradients_missing


def test_replicas_that_differ_in_one_bit_are_named():
    bit = math.nextafter(3.0, 4.0)
    records = [
        record(3.0, replicas=1),
        record(4.0, replicas=2),
        record(0.0, bit, replicas=1),
        record(0.0, 4.0, replicas=2),
    ]
    assert conclude(records, 2).replicas_differ == ((0, 2),)
    assert conclude([r._replace(replicas=0) for r in records], 2).replicas_differ == ()


@pytest.mark.parametrize("held", [math.nan, math.inf])
@pytest.mark.parametrize("p", [2, 1, math.inf, 0])
def test_a_replica_that_does_not_count_makes_the_norm_non_finite_when_its_gradients_are(held, p):
    assert math.isnan(conclude([record(3.0), record(0.0, held, elements=0)], p).norm)


def test_equal_nans_are_equal_replicas():
    records = [record(math.nan, replicas=1), record(0.0, math.nan, replicas=1)]
    assert conclude(records, 2).replicas_differ == ()


def test_a_norm_that_float32_cannot_hold_is_infinite_unless_some_gradient_is_float64():
    large = [record(3e38), record(3e38)]
    assert conclude(large, 2).norm == math.inf
    conclusion = conclude([large[0], record(3e38, float64=1)], 2)
    assert conclusion.float64
    assert conclusion.norm == pytest.approx(4.242640687e38)


def test_fingerprints_are_the_same_in_every_process_and_exact_in_float64():
    assert fingerprint("norm") == fingerprint(b"norm") == 0xE7FC9252513E
    assert fingerprint("norm") != fingerprint("Norm")
    assert all(int(float(fingerprint(str(n)))) == fingerprint(str(n)) for n in range(100))


def test_gradients_still_to_be_summed_and_ranks_that_cannot_measure_are_told():
    one, other = record(3.0, partial=7.0), record(4.0)
    assert (conclude([one, one], 2).partial, conclude([one, one], 2).partial_differs) == (True, False)
    assert conclude([one, other], 2).partial_differs
    assert conclude([record(3.0), record(4.0, error=1.0)], 2).errors == (1,)


def test_elements_that_every_rank_knows_are_added_once():
    records = [record(3.0), record(0.0)]
    assert with_more(conclude(records, 2), records, 4.0, 2).norm == 5.0
    nothing = [record(0.0, elements=0.0)] * 2
    assert with_more(conclude(nothing, -math.inf), nothing, 4.0, -math.inf).norm == 4.0  # and not 0, the norm of nothing
    assert math.isnan(with_more(conclude([record(math.nan)], 2), records, 4.0, 2).norm)
    assert with_more(conclude(records, 2), records, 3.5e38, 2).norm == math.inf  # float32 cannot hold it
