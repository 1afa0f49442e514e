"""How a re-enacted fault is shown: wrong beside right, rank by rank, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hpcli.report.formats import count_text
from hpcli.report.tables import WIDTH

if TYPE_CHECKING:
    from hpcli.faults.entry import Entry
    from hpcli.repro.verdict import Verdict

_LABEL = 13
_DIGITS = 9
_MOST_PROBLEMS = 8
_LONGEST_CELL = 24
_MOST_ROWS = 24


def verdict_lines(verdict: Verdict, inject: str | None) -> tuple[list[str], Table, list[str]]:
    """What stands above the table of a fault, the table, and what stands below it."""
    from hpcli.faults.entry import CLASSES, SHOWN_BY

    entry = verdict.entry
    notes: list[str] = []
    table = _table(verdict, notes)
    above = [
        f"{entry.id}: {entry.title}",
        "",
        *_labelled("reported as", entry.source),
        *_labelled("class", f"{entry.kind}: {CLASSES[entry.kind]}"),
        *_labelled("condition", entry.condition),
        *_labelled("faulty side", SHOWN_BY[entry.shown_by]),
        *_labelled("ran on", f"{count_text(verdict.ranks, 'rank')}, device {verdict.device}"),
        "",
    ]
    below = [
        *(part for number, text in enumerate(notes, 1) for part in _labelled(f"[{number}]", text)),
        "",
        *_passed(verdict),
        *_labelled("how we know", entry.how_we_know),
        *_labelled("why", entry.why),
    ]
    if inject:
        below += _labelled("in training", f"hpcli check-norm --ranks 4 --inject {inject}")
    return above, table, [*below, "", *conclusion_lines(verdict)]


def conclusion_lines(verdict: Verdict) -> list[str]:
    """Whether the fault appeared and the library is right, and where not."""
    shown = "the fault appears as reported" if not verdict.not_shown else "THE FAULT DOES NOT APPEAR as reported"
    right = "the library is right" if not verdict.not_right else "THE LIBRARY IS NOT RIGHT"
    lines = [f"{shown}; {right} ({verdict.seconds:.1f} s)"]
    for side, problems in (("faulty side", verdict.not_shown), ("library", verdict.not_right)):
        lines += [part for problem in problems[:_MOST_PROBLEMS] for part in _folded(f"  {side}: {problem}")]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"  {side}: and {len(problems) - _MOST_PROBLEMS} more")
    return lines


def _table(verdict: Verdict, notes: list[str]) -> Table:
    """The values rank by rank; where that would be many lines, ranks that hold the same share them. Long texts go into ``notes``, and their numbers into the table."""
    from hpcli.faults.entry import expectations, shown
    from hpcli.repro.verdict import outcome_text

    entry = verdict.entry
    sides = (
        (verdict.wrong, expectations(entry.wrong, verdict.ranks)),
        (verdict.right, expectations(entry.right, verdict.ranks)),
    )
    blocks: list[tuple[list[int], list[list[str]]]] = []
    for rank in range(verdict.ranks):
        cells = []
        for outcomes, expected in sides:
            cells += [_by_name(outcome_text(outcomes[rank])), _by_name(shown(expected[rank]))]
        names = list(dict.fromkeys(name for cell in cells for name in cell))
        rows = [[name, *(_noted(_text(cell.get(name)), notes) for cell in cells)] for name in names]
        if blocks and blocks[-1][1] == rows and verdict.ranks * len(rows) > _MOST_ROWS:
            blocks[-1][0].append(rank)
        else:
            blocks.append(([rank], rows))
    named = any(row[0] for _, rows in blocks for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    titles = ("rank", "", "faulty", "as reported", "library", "right")
    for number, title in enumerate(titles):
        if number != 1 or named:
            table.add_column(Text(title), justify="right" if number == 0 else "left", vertical="top", overflow="fold")
    for ranks, rows in blocks:
        which = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        for number, (name, *values) in enumerate(rows):
            table.add_row(*map(Text, ["" if number else which, *([name] if named else []), *values]))
    return table


def _by_name(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"": value}


def _noted(text: str, notes: list[str]) -> str:
    if len(text) <= _LONGEST_CELL:
        return text
    if text not in notes:
        notes.append(text)
    return f"[{notes.index(text) + 1}]"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}" if isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_text(entry) for entry in value) + ")"
    return str(value)


def _passed(verdict: Verdict) -> Iterator[str]:
    """Through which functions the first rank's exception came."""
    from hpcli.faults.attempt import is_raised

    value = verdict.wrong[0].get("value")
    values = value.values() if isinstance(value, Mapping) and not is_raised(value) else [value]
    raised = next((entry for entry in values if is_raised(entry)), None)
    if raised is None:
        return
    frames = [
        _at_most(f"{name}  ", f"{_ending(file)}:{line}", WIDTH - _LABEL)
        for file, line, name in raised["through"]
        if "/hpcli/repro/" not in file and not name.startswith("<")
    ]
    yield from (f"{'raised in' if number == 0 else '':<{_LABEL}}{frame}" for number, frame in enumerate(frames[-12:]))


def _at_most(head: str, tail: str, width: int) -> str:
    """Both, the tail without its beginning where they are too long together."""
    left = width - len(head)
    return head + (tail if len(tail) <= left else f"..{tail[2 - left :]}")


def _ending(file: str) -> str:
    for package in ("/hyper_parallel/", "/hpcli/", "/torch/", "/mindspore/"):
        _, found, after = file.rpartition(package)
        if found:
            return f"{package[1:]}{after}"
    return file.rpartition("/")[2]


def _labelled(label: str, text: str) -> list[str]:
    return wrap(f"{label:<{_LABEL}}{text}", WIDTH, subsequent_indent=" " * _LABEL, break_on_hyphens=False)


def _folded(line: str) -> list[str]:
    return wrap(line, WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)


def summary_table(verdicts: Sequence[Verdict]) -> Table:
    """One line for each fault."""
    table = _plain_table(("id", "what went wrong", "class", "ranks", "fault", "library", "time"))
    for verdict in verdicts:
        table.add_row(
            Text(verdict.entry.id, no_wrap=True),
            Text(verdict.entry.title),
            Text(verdict.entry.kind, no_wrap=True),
            Text(str(verdict.ranks)),
            Text("NOT SHOWN" if verdict.not_shown else "shown", no_wrap=True),
            Text("WRONG" if verdict.not_right else "right", no_wrap=True),
            Text(f"{verdict.seconds:.1f}s", no_wrap=True),
        )
    return table


def entry_table(entries: Sequence[Entry]) -> Table:
    """What can be re-enacted."""
    table = _plain_table(("id", "reported as", "what went wrong", "class", "ranks", "time"))
    for entry in entries:
        table.add_row(
            Text(entry.id, no_wrap=True),
            Text(entry.source),
            Text(entry.title),
            Text(entry.kind, no_wrap=True),
            Text(str(entry.ranks[0])),
            Text(f"{entry.seconds:g}s", no_wrap=True),
        )
    return table


def _plain_table(titles: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for title in titles:
        right = title in ("ranks", "time")
        table.add_column(Text(title), justify="right" if right else "left", vertical="top", overflow="fold")
    return table


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry as data, without what it expects."""
    return {
        "id": entry.id,
        "title": entry.title,
        "class": entry.kind,
        "source": entry.source,
        "condition": entry.condition,
        "shown_by": entry.shown_by,
        "how_we_know": entry.how_we_know,
        "why": entry.why,
        "ranks": list(entry.ranks),
        "seconds": entry.seconds,
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as an event."""
    from hpcli.faults.entry import expectations, shown
    from hpcli.repro.verdict import outcome_text

    def side(outcomes: Sequence[Mapping[str, Any]], expected: Any) -> list[dict[str, Any]]:
        wanted = expectations(expected, verdict.ranks)
        return [
            {"rank": rank, "value": outcome_text(outcome), "expected": shown(one)}
            for rank, (outcome, one) in enumerate(zip(outcomes, wanted, strict=True))
        ]

    return {
        "event": "repro",
        **entry_json(verdict.entry),
        "ranks": verdict.ranks,
        "device": verdict.device,
        "wrong": side(verdict.wrong, verdict.entry.wrong),
        "right": side(verdict.right, verdict.entry.right),
        "fault_shown": not verdict.not_shown,
        "library_right": not verdict.not_right,
        "problems": [*verdict.not_shown, *verdict.not_right],
        "seconds": verdict.seconds,
    }
