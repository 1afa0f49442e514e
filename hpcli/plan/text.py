"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcli.plan.blocks import Block, blocks, verdict_line
from hyper_parallel.core.pipeline_parallel import Timeline, draw

WIDTH = 100
BAR = 24


def text_lines(told: Mapping[str, Any], timeline: Timeline | None) -> Iterator[str]:
    """The report in lines of at most 100 columns; the verdict stands first and last."""
    yield f"{told['config_file']}: {verdict_line(told)}"
    for block in blocks(told, timeline):
        if block.heading:
            yield ""
            yield block.heading
        yield from (f"  {line}" for line in block.lines)
        yield from (f"  {line}" for line in table_lines(block, WIDTH - 2))
        if block.drawn:
            yield from (f"  {line}"[:WIDTH] for line in block.drawn)
        if block.picture is not None:
            yield from (f"  {line}".rstrip() for line in draw(block.picture, WIDTH - 2).splitlines())
    yield ""
    yield verdict_line(told)


def table_lines(block: Block, width: int) -> Iterator[str]:
    """The table of a block, numbers to the right, bars behind; a last column of text is cut where it would be too wide."""
    if not block.rows:
        return
    widths = [max(len(row[column]) for row in block.rows) for column in range(len(block.rows[0]))]
    right = [all(is_number(row[column]) for row in block.rows[1:]) for column in range(len(widths))]
    for number, row in enumerate(block.rows):
        cells = [cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in zip(row, widths, right, strict=True)]
        bar = "  " + bar_text(block.bars[number - 1]) if block.bars and number else ""
        yield ("  ".join(cells) + bar)[:width].rstrip()


def bar_text(share: float) -> str:
    """A bar of up to 24 signs; anything above nothing has one."""
    return "#" * (max(1, round(BAR * min(share, 1.0))) if share else 0)


def is_number(cell: str) -> bool:
    """Whether a cell belongs to the right."""
    return not cell or cell.lstrip("-")[:1].isdigit() or cell == "-"
