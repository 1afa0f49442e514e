"""One measured promise, and the table of all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

_COLUMNS = ("", "measured", "compared with", "ratio", "target", "")
_WIDTH = 99


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        part: "start", "steps", "norm" or "plan".
        name: what was measured.
        ours, theirs: value with unit, and what it is compared with; ``theirs`` may be empty.
        value: what the target is about: a ratio or a quantity.
        unit: of ``value``: "x" for a ratio.
        target: bound of ``value``; None where there is none.
        at_least: the bound is a lower one.
    """

    part: str
    name: str
    ours: str
    theirs: str
    value: float
    unit: str = "x"
    target: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def target_text(self) -> str:
        if self.target is None:
            return ""
        return f"{'>=' if self.at_least else '<='} {self.target:g} {self.unit}"

    @property
    def verdict(self) -> str:
        return "" if self.met is None else "met" if self.met else "NOT MET"


def seconds(value: float) -> str:
    """A duration with three digits and a unit that fits."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:#.3g}".rstrip(".") + f" {unit}"
    raise AssertionError("unreachable")


def table(results: Sequence[Result]) -> str:
    """All results as text, one block a part, at most 100 columns wide."""
    cells = [
        (r.name, r.ours, r.theirs, f"{r.value:#.3g}".rstrip(".") + f" {r.unit}", r.target_text, r.verdict)
        for r in results
    ]
    widths = [max(len(row[i]) for row in [*cells, _COLUMNS]) for i in range(len(_COLUMNS))]
    if sum(widths) + 2 * (len(widths) - 1) > _WIDTH:
        raise AssertionError(f"the table is {sum(widths) + 2 * (len(widths) - 1)} columns wide")
    lines = [_line(_COLUMNS, widths)]
    part = ""
    for result, row in zip(results, cells, strict=True):
        if result.part != part:
            part = result.part
            lines += ["", part]
        lines.append(_line(row, widths))
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others, verdict = row
    return "  ".join(
        [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=False)), verdict]
    ).rstrip()


def progress(text: str) -> None:
    """Tell who waits what is going on; standard output is kept for the table."""
    print(text, file=sys.stderr, flush=True)
