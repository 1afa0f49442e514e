"""The table that shows every rank's norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcli.report.formats import MISSING, count_text, digits_that_tell_apart, norm_text
from hpcli.report.verdict import bits, ranks_by_norm

Row = Mapping[str, Any]

WIDTH = 100
"""The widest a table gets, however wide the terminal, so that it can be pasted into an issue."""

GAP = 2
"""Blanks between columns; rich's column separator, itself a blank, is one of them."""

LONGEST_HOST = 14
MOST_ROWS = 64
EDGE_ROWS = 8
MOST_DIFFERING_ROWS = 32


class _Column(NamedTuple):
    title: str
    cell: Callable[[Row], str]
    right: bool = True


def norm_table(rows: Sequence[Row], title: str, width: int = WIDTH) -> RenderableType:
    """The rows of a ``norm_table`` event as a table of at most ``width`` columns, and what had to be left out of it.

    Up to 64 ranks are all shown. Of more, the first and the last eight and those that stand out: their global norm is
    not the most widely held one, or they hold another number of gradients than most.
    """
    rows = sorted(rows, key=lambda row: int(row["rank"]))
    width = min(width, WIDTH)
    shown = rows if len(rows) <= MOST_ROWS else _telling_rows(rows)
    columns, dropped = _fitting(_columns(rows), shown, width)
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        table.add_column(
            Text(column.title), justify="right" if column.right else "left", no_wrap=False, vertical="top"
        )
    expected = -1 if not shown else shown[0]["rank"]
    for row in shown:
        if row["rank"] != expected:
            table.add_row(Text("..."))
        table.add_row(*(Text(column.cell(row), no_wrap=True, overflow="ellipsis") for column in columns))
        expected = row["rank"] + 1
    notes = []
    if left_out := len(rows) - len(shown):
        notes.append(f"{left_out:,} of {count_text(len(rows), 'rank')} left out")
    if dropped:
        notes.append(
            "too narrow for " + ", ".join(f'"{" ".join(column.title.split())}"' for column in dropped)
        )
    return Group(table, Text("; ".join(notes))) if notes else table


def _telling_rows(rows: Sequence[Row]) -> list[Row]:
    usual_norm = bits(ranks_by_norm(rows)[0][0])
    counts = [(row.get("with_gradient"), row.get("without_gradient")) for row in rows]
    usual_counts = max(set(counts), key=counts.count)
    differing = [
        index
        for index, row in enumerate(rows)
        if bits(row.get("global_norm")) != usual_norm or counts[index] != usual_counts
    ]
    edges = [*range(EDGE_ROWS), *range(len(rows) - EDGE_ROWS, len(rows))]
    return [rows[index] for index in sorted({*edges, *differing[:MOST_DIFFERING_ROWS]})]


def _columns(rows: Sequence[Row]) -> list[_Column]:
    digits = digits_that_tell_apart(row.get("global_norm") for row in rows)
    axes = _axes(rows)
    return [
        _Column("rank", lambda row: str(row["rank"])),
        _Column("host, device", _place, right=False),
        _Column(",\n".join(axes) or "mesh", lambda row: _position(row, axes), right=False),
        _Column("with\ngrad", lambda row: _count(row.get("with_gradient"))),
        _Column("without\ngrad", lambda row: _count(row.get("without_gradient"))),
        _Column("local norm", lambda row: norm_text(row.get("local_norm"))),
        _Column("contributed", lambda row: norm_text(row.get("contributed"))),
        _Column("global norm", lambda row: norm_text(row.get("global_norm"), digits)),
    ]


def _axes(rows: Sequence[Row]) -> list[str]:
    """The axes along which the ranks differ; all of them where there is but one rank."""
    coordinates = [row.get("coordinates") or {} for row in rows]
    every = list(dict.fromkeys(axis for position in coordinates for axis in position))
    return [axis for axis in every if any(position.get(axis) for position in coordinates)] or every


def _place(row: Row) -> str:
    """``host, device``, the host shortened to what tells machines apart most often: its first label."""
    host, device = str(row.get("host") or ""), str(row.get("device") or "")
    host = host.split(".")[0] if not host.replace(".", "").isdigit() else host
    if len(host) > LONGEST_HOST:
        host = f"{host[:5]}..{host[-7:]}"
    return ", ".join(part for part in (host, device) if part) or MISSING


def _position(row: Row, axes: Sequence[str]) -> str:
    coordinates = row.get("coordinates") or {}
    return ", ".join(str(coordinates.get(axis, 0)) for axis in axes) or MISSING


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


# What a narrow terminal does without, first to last; rank, contribution and global norm stay.
_DISPENSABLE = (1, 4, 3, 2, 5, 6)


def _fitting(columns: list[_Column], rows: Sequence[Row], width: int) -> tuple[list[_Column], list[_Column]]:
    """The columns that fit ``width`` without cutting a number, and those that do not."""
    natural = [_natural_width(column, rows) for column in columns]
    dropped: list[int] = []
    for index in _DISPENSABLE:
        kept = [width_ for number, width_ in enumerate(natural) if number not in dropped]
        if sum(kept) + GAP * (len(kept) - 1) <= width:
            break
        dropped.append(index)
    dropped.sort()
    return [c for i, c in enumerate(columns) if i not in dropped], [columns[i] for i in dropped]


def _natural_width(column: _Column, rows: Sequence[Row]) -> int:
    texts = [*column.title.split("\n"), *(column.cell(row) for row in rows)]
    return max(len(text) for text in texts)


class ReportConsole(Console):
    """A rich console that tells its caller, instead of leaving the process, when the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain_console(file: Any, width: int) -> ReportConsole:
    """A rich console for a stream that is no terminal: nothing but printable characters and line feeds."""
    return ReportConsole(
        file=file,
        width=width,
        force_terminal=False,
        force_interactive=False,
        color_system=None,
        no_color=True,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
