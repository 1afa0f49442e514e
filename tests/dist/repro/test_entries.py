"""The catalogue as a regression test: every fault appears as reported, and the library is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcli.faults.entry import Entry
from hpcli.faults.registry import entries, load_file, module_of
from hpcli.repro.run import Stage, missing
from hpcli.repro.verdict import Verdict

FAST_SECONDS = 3.0


def marked(entry: Entry) -> object:
    slow = entry.seconds > FAST_SECONDS
    marks = [pytest.mark.long] if slow else []
    if remedy := missing(entry):
        marks.append(pytest.mark.skip(reason=remedy))
    return pytest.param(entry, id=entry.id, marks=marks)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


def reproduced(stage: Stage, entry: Entry, ranks: int | None = None) -> Verdict:
    file = module_of(entry)
    planted = not hasattr(load_file(file), "wrong")
    return stage.reproduce(entry, file, ranks or entry.ranks[0], planted=planted)


@pytest.mark.parametrize("entry", [marked(entry) for entry in entries().values()])
def test_the_fault_appears_as_reported_and_the_library_is_right(stage: Stage, entry: Entry) -> None:
    verdict = reproduced(stage, entry)
    assert (verdict.not_shown, verdict.not_right) == ((), ())


OTHERS = [(entry, ranks) for entry in entries().values() for ranks in entry.ranks[1:]]


@pytest.mark.long
@pytest.mark.parametrize(("entry", "ranks"), OTHERS, ids=lambda value: getattr(value, "id", value))
def test_it_does_on_other_numbers_of_ranks_too(stage: Stage, entry: Entry, ranks: int) -> None:
    if remedy := missing(entry):
        pytest.skip(remedy)
    verdict = reproduced(stage, entry, ranks)
    assert (verdict.not_shown, verdict.not_right) == ((), ())
