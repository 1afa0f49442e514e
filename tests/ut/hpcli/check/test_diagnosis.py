"""Verdict and cause from evidence made by hand: two ranks, a weight (3, 4) cut in two, norm 5."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from typing import Any

import pytest

from hpcli.check.causes import CAUSES
from hpcli.check.evidence import Degrees, Evidence, Expected, expected_witness
from hpcli.check.powers import norm_of_pieces, power_norm
from hpcli.check.verdict import judge
from hpcli.faults.registry import faults

DEGREES = Degrees(pp=1, dp_replicate=1, dp_shard=2, ep=1, tp=1, zero_bubble=False, reduce_dtype="float32")
EXPECTED = Expected({"w": 25.0}, loss=2.0, norm_tolerance=1e-6, relative=1e-5, absolute=1e-7, witness={})


def fact(rank: int, norm: float, right: float, factor: float = 1.0, **changed: Any) -> dict[str, Any]:
    """A rank that holds ``right * factor`` where the reference has ``right``."""
    held = right * factor
    entry = {
        "name": "w",
        "class": "sharded",
        "missing": False,
        "gg": held**2,
        "gr": held * right,
        "rr": right**2,
        "to_right": (held - right) ** 2,
        "to_last_micro_batch": (held - 100.0) ** 2,
        "to_mean_of_means": (held - 100.0) ** 2,
    }
    return {
        "rank": rank,
        "coordinates": {"pp": 0, "dp_replicate": 0, "dp_shard": rank, "tp": 0},
        "collectives_add_up": True,
        "data": str(rank),
        "loss": 1.0,
        "reshards": False,
        "parameters": [entry],
        "classes": {"sharded": norm},
        "norm": struct.pack("<d", norm).hex(),
        "held": abs(held),
        "contributed": abs(held),
        "clipped": {"w": held**2},
        "collectives": 1,
    } | changed


def verdict(facts: list[dict[str, Any]], expected: Expected = EXPECTED, degrees: Degrees = DEGREES) -> Any:
    return judge("layout", facts, expected, degrees, 1.0)


def cause(facts: list[dict[str, Any]], expected: Expected = EXPECTED, degrees: Degrees = DEGREES) -> str:
    found = verdict(facts, expected, degrees).cause
    assert found is not None
    return found.id


def test_norms_that_differ_in_the_last_bit_are_told_apart_in_words():
    found = verdict([fact(0, 5.0, 3.0), fact(1, 5.0 + 2.0**-21, 4.0)]).cause
    assert found is not None and found.evidence == "rank by rank 5, 5.00000048; reference 5"


def test_a_wrong_sum_alone_is_named():
    witness = {"reduced": 1.0009765625}
    facts = [fact(rank, 5.0, right, witness={"reduced": 2.001953125}) for rank, right in ((0, 3.0), (1, 4.0))]
    found = verdict(facts, EXPECTED._replace(witness=witness)).cause
    assert found is not None and found.id == "sums-wrong"
    assert found.evidence == "1.0009765625 (reduced) came out as 2.001953125 on rank 0"


def test_a_slightly_wrong_loss_is_named():
    assert cause([fact(0, 5.0, 3.0, loss=1.0001), fact(1, 5.0, 4.0)]) == "losses-differ"


def test_what_is_right_holds():
    right = verdict([fact(0, 5.0, 3.0), fact(1, 5.0, 4.0)])
    assert right.holds
    assert right.cause is None
    assert (right.norm, right.difference, right.equal) == (5.0, 0.0, True)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ((3.0, 4.0), "local-norm-returned"),
        ((3.5, 3.5), "average-of-norms"),
        ((4.0, 4.0), "maximum-of-norms"),
        ((7.0, 7.0), "sum-of-norms"),
        ((3.0, 3.0), "rank-missing"),  # without rank 1: sqrt(25 - 16)
        ((5.0, 5.00001), "ranks-disagree"),
        ((5.01, 5.01), "norm-in-low-precision"),
        ((9.0, 9.0), "norm-differs"),
    ],
)
def test_wrong_norms_of_right_gradients_are_told_apart(norms, expected):
    assert cause([fact(0, norms[0], 3.0), fact(1, norms[1], 4.0)]) == expected


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (2.0, "summed-not-averaged"),
        (0.5, "averaged-not-summed"),
        (65536.0, "loss-scale-left-in"),
        (3.0, "gradients-differ"),
        (1000.0, "gradients-differ"),  # large, and no power of two
    ],
)
def test_a_factor_in_every_gradient_is_told_by_its_size(factor, expected):
    norm = 5.0 * factor
    assert cause([fact(0, norm, 3.0, factor), fact(1, norm, 4.0, factor)]) == expected


def test_replicas_that_all_count_are_told_by_the_weight_of_their_class():
    degrees = DEGREES._replace(dp_replicate=2, dp_shard=1)
    norm = math.sqrt(50.0)
    both = [fact(rank, norm, 5.0) for rank in (0, 1)]
    assert cause(both, degrees=degrees) == "replicated-counted-n-times"


def test_classes_are_weighed_one_by_one():
    facts = [fact(0, 5.0, 3.0), fact(1, 5.0, 4.0)]
    for one in facts:
        one["parameters"].append(one["parameters"][0] | {"name": "e", "class": "expert"})
        one["clipped"]["e"] = one["clipped"]["w"]
        one["classes"] = {"sharded": 5.0, "expert": math.sqrt(12.5)}
        one["norm"] = struct.pack("<d", math.sqrt(25.0 + 12.5)).hex()
    expected = EXPECTED._replace(squares={"w": 25.0, "e": 25.0})
    assert Evidence(facts, expected, DEGREES).weight("expert") == pytest.approx(0.5)
    assert cause(facts, expected) == "experts-partly-counted"


def test_the_check_does_not_pass_where_nothing_is_proved():
    dead = EXPECTED._replace(squares={"w": 0.0})
    assert cause([fact(0, 0.0, 0.0), fact(1, 0.0, 0.0)], dead) == "dead-model"
    assert cause([fact(0, 5.0, 3.0, data="x"), fact(1, 5.0, 4.0, data="x")]) == "same-data"
    assert cause([fact(0, 5.0, 3.0, collectives_add_up=False), fact(1, 5.0, 4.0)]) == "collectives-broken"
    missing = fact(1, 5.0, 4.0)
    missing["parameters"][0]["missing"] = True
    assert cause([fact(0, 5.0, 3.0), missing]) == "gradient-missing"
    assert not verdict([fact(0, math.nan, 3.0), fact(1, math.nan, 4.0)]).holds


def clipped(*factors: float) -> list[dict[str, Any]]:
    """Two ranks with norm 5 and max_norm 0.5, whose shards 3 and 4 were multiplied by ``factors``."""
    return [fact(0, 5.0, 3.0, clipped={"w": (3.0 * factors[0]) ** 2}), fact(1, 5.0, 4.0, clipped={"w": (4.0 * factors[1]) ** 2})]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.0, 1.0), "not-clipped"),
        ((0.01, 0.01), "clipped-twice"),
        ((0.5 / 3, 0.5 / 4), "clipped-by-own-norm"),
        ((0.1, 1.0), "clipped-in-part"),
        ((0.3, 0.3), "clipped-wrongly"),
    ],
)
def test_a_wrong_clip_after_a_right_norm_is_told_by_its_factor(factors, expected):
    assert cause(clipped(*factors), EXPECTED._replace(max_norm=0.5)) == expected


def test_a_clip_to_a_tenth_holds():
    assert verdict(clipped(0.1, 0.1), EXPECTED._replace(max_norm=0.5)).holds


def test_what_the_library_tells_of_its_ranks_must_be_what_they_hold():
    assert cause([fact(0, 5.0, 3.0, held=5.0), fact(1, 5.0, 4.0, held=5.0)]) == "parts-misreported"
    assert cause([fact(0, 5.0, 3.0, contributed=0.0), fact(1, 5.0, 4.0)]) == "parts-misreported"
    # what a rank is said to hold is no evidence for a cause: this one returned the norm of what it does hold
    assert cause([fact(0, 3.0, 3.0, held=5.0), fact(1, 4.0, 4.0, held=5.0)]) == "local-norm-returned"


def test_another_norm_type_is_checked_on_the_gradients_as_they_are():
    wanted = EXPECTED._replace(norm_type=math.inf)
    facts = [fact(0, 5.0, 3.0, norm_of_type=4.0), fact(1, 5.0, 4.0, norm_of_type=4.0)]
    for rank, one in enumerate(facts):
        one["parameters"][0] |= {"piece": ["w", str(rank)], "power_norm": [3.0, 4.0][rank]}
    assert verdict(facts, wanted).holds
    facts[1]["norm_of_type"] = 3.0
    assert cause(facts, wanted) == "norm-type-differs"


@pytest.mark.parametrize(("p", "expected"), [(0, 3), (1, 6), (3, 36 ** (1 / 3)), (math.inf, 3), (-math.inf, 0)])
def test_a_piece_that_two_ranks_hold_counts_once_in_any_norm(p, expected):
    one, two = [1.0, 0.0, 2.0], [3.0]
    pieces = [("w", "0", one), ("w", "3", two), ("w", "3", two)]
    facts = [{"parameters": [{"piece": [name, at], "power_norm": power_norm(held, p)}]} for name, at, held in pieces]
    assert norm_of_pieces(facts, p) == pytest.approx(expected)


def test_offload_that_changes_bits_fails_where_arithmetic_is_the_same_and_is_told_elsewhere():
    changed = {"offload": ["norm of step 2"]}
    assert cause([fact(0, 5.0, 3.0, **changed), fact(1, 5.0, 4.0, **changed)]) == "offload-changes-bits"
    changed["offload_binds"] = False
    told = verdict([fact(0, 5.0, 3.0, **changed), fact(1, 5.0, 4.0, **changed)])
    assert (told.holds, told.notes) == (True, ("offload changes norm of step 2, as it may on this device",))


def test_a_shard_of_another_shape_is_wrong():
    short = fact(1, 5.0, 4.0)
    del short["parameters"][0]["gg"]
    assert not verdict([fact(0, 5.0, 3.0), short]).holds


@pytest.mark.parametrize(
    ("reduce_dtype", "found", "expected"),
    [
        ("float32", {"reduced": 1.0, "accumulated": 258.0}, "reduce-dtype-too-narrow"),
        ("float32", {"reduced": 1.0, "accumulated": 256.0}, "accumulated-too-narrow"),
        ("bfloat16", {"reduced": 1.0009765625, "accumulated": 256.0}, "reduce-dtype-too-wide"),
    ],
)
def test_the_witnesses_see_a_wrong_reduce_dtype(reduce_dtype, found, expected):
    degrees = DEGREES._replace(reduce_dtype=reduce_dtype)
    wanted = EXPECTED._replace(witness=expected_witness(degrees))
    assert cause([fact(0, 5.0, 3.0, witness=found), fact(1, 5.0, 4.0, witness=found)], wanted, degrees) == expected


def test_every_fault_expects_a_cause_that_exists():
    assert {fault.cause for fault in faults().values()} <= set(CAUSES)
    assert len(faults()) >= 15


def test_the_judges_know_neither_the_faults_nor_the_norm():
    code = "import sys, hpcli.check.verdict; print([m for m in sys.modules if 'faults' in m or 'norm' in m or m == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_reference_knows_neither_the_clip_nor_the_norm_nor_the_faults():
    code = (
        "import sys, hpcli.check.reference; "
        "print([m for m in sys.modules if 'hpcli.faults' in m or 'clip_grad' in m and 'hyper' in m or 'core.norm' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
