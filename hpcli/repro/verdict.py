"""Whether a fault appeared as reported and the library is right, from nothing but what the ranks returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcli.faults.entry import Entry, Expected, Lost, OneOf, difference, expectations, is_one_for_all, shown

Outcome = Mapping[str, Any]
"""``value``; or ``lost``, what the launcher says of a rank that never answered."""


class Verdict(NamedTuple):
    """What came of re-enacting a fault.

    Attributes:
        wrong, right: the outcome on each rank of the faulty side, and of the library.
        not_shown: where the fault did not appear as reported; empty where it did.
        not_right: where the library is not right.
    """

    entry: Entry
    ranks: int
    device: str
    wrong: Sequence[Outcome]
    right: Sequence[Outcome]
    not_shown: tuple[str, ...]
    not_right: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.not_shown and not self.not_right


def judge(
    entry: Entry, ranks: int, device: str, wrong: Sequence[Outcome], right: Sequence[Outcome], seconds: float
) -> Verdict:
    """Compare what the ranks told with what the entry states."""
    not_shown = _differences(wrong, entry.wrong, ranks, entry.tolerance)
    not_right = _differences(right, entry.right, ranks, entry.tolerance)
    if not not_right and is_one_for_all(entry.right, ranks) and len({repr(outcome_text(outcome)) for outcome in right}) > 1:
        not_right.append("the ranks do not hold the same bits")
    if not not_shown and not not_right and [*map(outcome_text, wrong)] == [*map(outcome_text, right)]:
        not_shown.append("the faulty side gives what the library gives: nothing is shown")
    return Verdict(entry, ranks, device, wrong, right, tuple(not_shown), tuple(not_right), seconds)


def not_started(entry: Entry, ranks: int, device: str, reason: str) -> Verdict:
    """The verdict where no rank could be started at all."""
    nothing: list[Outcome] = [{"lost": reason}] * ranks
    return Verdict(entry, ranks, device, nothing, nothing, (reason,), (reason,), 0.0)


def _differences(outcomes: Sequence[Outcome], expected: Expected, ranks: int, tolerance: float) -> list[str]:
    wanted = expectations(expected, ranks)
    if len(outcomes) != ranks or len(wanted) != ranks:
        return [f"{len(outcomes)} answers and {len(wanted)} expectations for {ranks} ranks"]
    problems = []
    for rank, (outcome, one) in enumerate(zip(outcomes, wanted, strict=True)):
        if problem := _difference(outcome, one, tolerance):
            problems.append(f"rank {rank}: {problem}")
    return problems


def _difference(outcome: Outcome, expected: Expected, tolerance: float) -> str:
    """Empty where the outcome is the expected one."""
    if "value" in outcome:
        return difference(outcome["value"], expected, tolerance)
    options = expected.expected if isinstance(expected, OneOf) else (expected,)
    if any(isinstance(one, Lost) and one.message in outcome["lost"] for one in options):
        return ""
    return f"{outcome['lost']}, expected {shown(expected)}"


def outcome_text(outcome: Outcome) -> Any:
    """An outcome as it is shown: a value, or words."""
    return shown(outcome["value"]) if "value" in outcome else outcome["lost"]
