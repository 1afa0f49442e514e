"""The table of check-norm, and what is said below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hpcli.report.formats import MISSING, count_text
from hpcli.report.tables import WIDTH

if TYPE_CHECKING:
    from hpcli.check.verdict import Verdict
    from hpcli.faults.fault import Fault

_COLUMNS = (
    # title, right-aligned
    ("layout", False),
    ("norm", True),
    ("off by", True),
    ("ranks\nequal", False),
    ("worst gradient", False),
    ("off by", True),
    ("coll.", True),
    ("time", True),
    ("", False),
)
_PARAMETER = 4  # the column that gives way


def check_table(verdicts: Sequence[Verdict]) -> Table:
    """One line a layout; at most 100 columns: names of parameters are shortened to what the other columns leave."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    rows = [_cells(verdict) for verdict in verdicts]
    titles = [max(title.split("\n"), key=len) for title, _ in _COLUMNS]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    left = WIDTH - (sum(widths) - widths[_PARAMETER]) - (len(_COLUMNS) - 1)
    for title, right in _COLUMNS:
        table.add_column(Text(title), justify="right" if right else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        row[_PARAMETER] = _ending(row[_PARAMETER], left)
        table.add_row(*map(Text, row))
    return table


def _cells(verdict: Verdict) -> list[str]:
    ran = not isnan(verdict.norm)
    name, off = verdict.worst
    return [
        verdict.layout,
        f"{verdict.norm:.7g}" if ran else MISSING,
        f"{verdict.difference:.0e}" if ran else MISSING,
        ("yes" if verdict.equal else "NO") if ran else MISSING,
        name,
        f"{off:.0e}" if name else MISSING,
        str(verdict.collectives) if ran else MISSING,
        f"{verdict.seconds:.1f}s",
        "ok" if verdict.holds else "FAILED",
    ]


def _ending(name: str, length: int) -> str:
    """The end of a parameter's name, which tells more than its beginning."""
    return name if len(name) <= length else f"..{name[2 - length :]}"


def closing_lines(verdicts: Sequence[Verdict], ranks: int, seconds: float) -> list[str]:
    """One line of summary, then what failed and why."""
    failed = [verdict for verdict in verdicts if not verdict.holds]
    what = count_text(len(verdicts), "layout")
    if not failed:
        lines = [f"{what} on {count_text(ranks, 'rank')}: all hold, in {seconds:.1f} s"]
    else:
        lines = [f"{len(failed)} of {what} on {count_text(ranks, 'rank')} failed, in {seconds:.1f} s"]
    for verdict in failed:
        lines.append("")
        lines.append(f"{verdict.layout}:")
        for problem in verdict.problems:
            first, *more = problem.splitlines()
            lines += [f"  - {first}", *(f"    {line.strip()}" for line in more)]
        if verdict.cause is not None:
            lines.append(f"  cause: {verdict.cause}")
    lines += [f"{verdict.layout}: {note}" for verdict in verdicts for note in verdict.notes]
    return [part for line in lines for part in (_folded(line) or [""])]


def allowed_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """What "off by" may be: one line where that is one thing for all layouts, else one for each."""
    by_bounds: dict[tuple[float, float], list[str]] = {}
    for verdict in verdicts:
        if any(verdict.allowed):
            by_bounds.setdefault(verdict.allowed, []).append(verdict.layout)
    usual = max(by_bounds, key=lambda bounds: len(by_bounds[bounds]), default=None)
    lines = []
    for bounds, layouts in sorted(by_bounds.items(), key=lambda entry: entry[0] != usual):
        which = "" if bounds == usual else f" in {', '.join(layouts)}"
        lines += _folded(f"off by: relative, at most {bounds[0]:.0e} (norm) and {bounds[1]:.0e} (gradients){which}")
    return lines


def _folded(line: str) -> list[str]:
    """``line`` in lines of the table's width, those after the first indented by two more."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as an event."""
    return {
        "event": "layout",
        "layout": verdict.layout,
        "norm": verdict.norm,
        "relative_difference": verdict.difference,
        "ranks_equal": verdict.equal,
        "worst_parameter": verdict.worst[0],
        "worst_difference": verdict.worst[1],
        "collectives_per_clip": verdict.collectives,
        "seconds": verdict.seconds,
        "holds": verdict.holds,
        "problems": list(verdict.problems),
        "notes": list(verdict.notes),
        "allowed_norm_difference": verdict.allowed[0],
        "allowed_gradient_difference": verdict.allowed[1],
        "cause": verdict.cause.id if verdict.cause else None,
        "evidence": verdict.cause.evidence if verdict.cause else None,
    }


def fault_table(faults: Mapping[str, Fault]) -> Table:
    """What can be planted."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("fault", "what it is", "reported as"):
        table.add_column(Text(title), vertical="top", overflow="fold")
    for name, fault in faults.items():
        table.add_row(Text(name, no_wrap=True), Text(fault.title), Text(fault.source))
    return table
