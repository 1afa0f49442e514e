"""From what ranks return to whether a fault appeared and the library is right."""

from __future__ import annotations

from typing import Any

import pytest

from hpcli.faults.attempt import attempt
from hpcli.faults.entry import ByRank, Entry, Lost, Not, OneOf, Raises, Says
from hpcli.repro.verdict import judge

ENTRY = Entry(
    id="toy-1",
    title="norms added up",
    kind="ranks",
    source="toy#1",
    condition="3 and 4 on two ranks",
    shown_by="formula",
    wrong=7.0,
    right=5.0,
    how_we_know="sqrt(9 + 16) = 5",
    why="One. Two. Three.",
)


def values(*given: Any) -> list[dict[str, Any]]:
    return [{"value": value} for value in given]


def judged(faulty: list[Any], library: list[Any], **changes: Any) -> Any:
    return judge(ENTRY._replace(**changes), 2, "cpu", faulty, library, 0.0)


def test_a_fault_that_appears_beside_a_right_library_holds() -> None:
    assert judged(values(7.0, 7.0), values(5.0, 5.0)).holds


@pytest.mark.parametrize("wrong", [values(5.0, 5.0), values(7.0, 5.0), values(7.0), [{"lost": "x"}] * 2, values("7", 7.0)])
def test_a_fault_that_does_not_appear_on_every_rank_as_reported_fails(wrong: list[Any]) -> None:
    verdict = judged(wrong, values(5.0, 5.0))
    assert verdict.not_shown and not verdict.not_right and not verdict.holds


def test_a_wrong_library_fails_on_any_rank() -> None:
    verdict = judged(values(7.0, 7.0), values(5.0, 5.1))
    assert verdict.not_right == ("rank 1: 5.1, expected 5.0",)
    assert not verdict.holds


def test_the_librarys_ranks_must_agree_on_bits_where_one_value_is_right_for_all() -> None:
    assert judged(values(7.0, 7.0), values(5.0, 5.0 + 1e-9)).not_right == ("the ranks do not hold the same bits",)
    by_rank = ByRank((5.0, 5.0))
    assert judged(values(7.0, 7.0), values(5.0, 5.0 + 1e-9), right=by_rank).holds


def test_two_sides_that_give_the_same_show_nothing() -> None:
    verdict = judged(values(5.0, 5.0), values(5.0, 5.0), wrong=5.0)
    assert verdict.not_shown == ("the faulty side gives what the library gives: nothing is shown",)


def test_expectations_may_depend_on_rank_and_on_the_number_of_ranks() -> None:
    assert judged(values(1.0, 2.0), values(5.0, 5.0), wrong=ByRank((1.0, 2.0))).holds
    assert judged(values(2.0, 2.0), values(5.0, 5.0), wrong=float).holds
    assert judged(values(1.0, 2.0), values(5.0, 5.0), wrong=ByRank((1.0,))).not_shown


def test_an_exception_must_have_the_class_the_text_and_the_path() -> None:
    def inner() -> None:
        raise RuntimeError("no backend for cpu")

    def outer() -> None:
        inner()

    raised = {"value": attempt(outer)}
    here = __file__.rpartition("/")[2]
    right = Raises("no backend", through=(f"{here}:outer", f"{here}:inner"))
    assert judged([raised] * 2, values(5.0, 5.0), wrong=right).holds
    for other in (
        Raises("no backend", "ValueError"),
        Raises("another text"),
        Raises("no backend", through=(f"{here}:inner", f"{here}:outer")),
        Raises("no backend", through=("clip_grad.py:inner",)),
        7.0,
        Lost(),
    ):
        assert judged([raised] * 2, values(5.0, 5.0), wrong=other).not_shown


def test_lost_ranks_and_parts_of_texts() -> None:
    lost = ByRank((Lost("timed out"), 4.0))
    assert judged([{"lost": "rank 0 timed out"}, *values(4.0)], values(5.0, 5.0), wrong=lost).holds
    assert judged([{"lost": "rank 0 died"}, *values(4.0)], values(5.0, 5.0), wrong=lost).not_shown
    assert judged(values("a long text", "a long text"), values(5.0, 5.0), wrong=Says("long")).holds
    assert judged(values("a short text", "a long text"), values(5.0, 5.0), wrong=Says("long")).not_shown


def test_one_of_several_outcomes() -> None:
    either = ByRank((OneOf((4.0, Lost("died"))), 4.0))
    for first in ({"value": 4.0}, {"lost": "rank 1 died"}):
        assert judged([first, *values(4.0)], values(5.0, 5.0), wrong=either).holds
    for first in ({"value": 5.0}, {"lost": "rank 1 slept"}):
        assert judged([first, *values(4.0)], values(5.0, 5.0), wrong=either).not_shown


def test_any_finite_number_but_one() -> None:
    assert judged(values(1.01, 0.5), values(5.0, 5.0), wrong=Not(1.0)).holds
    for same in (1.0, 1.0 + 1e-9, float("nan"), "1.01"):
        assert judged(values(same, 0.5), values(5.0, 5.0), wrong=Not(1.0)).not_shown


def test_values_are_compared_deeply_and_by_type() -> None:
    right = {"norm": 5.0, "clipped": [0.6, 0.8], "raised": False, "nothing": float("nan")}
    told = {"norm": 5.0 + 1e-7, "clipped": [0.6, 0.8], "raised": False, "nothing": float("nan")}
    assert judged(values(7.0, 7.0), values(told, told), right=right).holds
    for change in ({"norm": 5.1}, {"clipped": [0.6]}, {"raised": 0}, {"nothing": 0.0}, {"more": 1}):
        assert judged(values(7.0, 7.0), values(told | change, told), right=right).not_right
