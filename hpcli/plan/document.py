"""A plan as a document that stands alone: HTML for a browser, or Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from hpcli.plan.blocks import Block, blocks, verdict_line
from hpcli.plan.picture import svg
from hpcli.plan.text import bar_text, is_number
from hpcli.report.errors import cannot_write
from hyper_parallel.core.pipeline_parallel import Timeline, draw

_STYLE = """
body { font-family: sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0; }
th, td { padding: 0.15rem 0.8rem 0.15rem 0; text-align: left; border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; }
pre { background: #f6f6f6; padding: 0.5rem; overflow-x: auto; }
.bar { display: inline-block; height: 0.8rem; background: #4a7ebb; }
.track { width: 16rem; background: #eee; padding: 0; }
.verdict { font-size: 1.1rem; font-weight: bold; }
"""


def write(path: Path, told: Mapping[str, Any], timeline: Timeline | None) -> None:
    """Write the report to ``path``, in the form that its ending names.

    Raises:
        OSError: said with what to do, where it cannot be written.
    """
    parts = html_lines(told, timeline) if path.suffix == ".html" else markdown_lines(told, timeline)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write("to", str(path), error) from error


def html_lines(told: Mapping[str, Any], timeline: Timeline | None) -> Iterator[str]:
    """A page without anything from elsewhere: styles and pictures are in it."""
    title = escape(f"Plan of {told['config_file']}")
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{_STYLE}</style>'
    yield f'</head>\n<body>\n<h1>{title}</h1>\n<p class="verdict">{escape(verdict_line(told))}</p>'
    for block in blocks(told, timeline):
        if not block.heading:
            yield f"<pre>{escape(chr(10).join(block.lines))}</pre>"
            continue
        yield f"<h2>{escape(block.heading)}</h2>"
        if block.lines:
            yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in block.lines) + "</ul>"
        if block.rows:
            yield from _html_table(block)
        if block.drawn:
            yield f"<pre>{escape(chr(10).join(block.drawn))}</pre>"
        if block.picture is not None:
            yield svg(block.picture)
    yield "</body>\n</html>"


def _html_table(block: Block) -> Iterator[str]:
    numbers = _number_columns(block)
    yield "<table>"
    for index, row in enumerate(block.rows):
        tag = "td" if index else "th"
        cells = (
            f"<{tag}{' class=number' * number}>{escape(cell)}</{tag}>" for cell, number in zip(row, numbers, strict=True)
        )
        bar = ""
        if block.bars:
            share = block.bars[index - 1] if index else 0
            bar = f'<{tag} class="track"><span class="bar" style="width: {100 * min(share, 1):.1f}%"></span></{tag}>'
        yield f"<tr>{''.join(cells)}{bar}</tr>"
    yield "</table>"


def markdown_lines(told: Mapping[str, Any], timeline: Timeline | None) -> Iterator[str]:
    """Plain Markdown; the schedule is drawn in text."""
    yield f"# Plan of {told['config_file']}\n\n**{verdict_line(told)}**"
    for block in blocks(told, timeline):
        yield f"\n## {block.heading}\n" if block.heading else ""
        if not block.heading:
            yield from ("```", *block.lines, "```")
            continue
        yield from (f"- {line}" for line in block.lines)
        if block.rows:
            yield ""
            yield from _markdown_table(block)
        if block.drawn:
            yield from ("", "```", *block.drawn, "```")
        if block.picture is not None:
            yield from ("", "```", *draw(block.picture, 98).splitlines(), "```")


def _markdown_table(block: Block) -> Iterator[str]:
    numbers = _number_columns(block)
    for index, row in enumerate(block.rows):
        bar = [bar_text(block.bars[index - 1]) if index else ""] if block.bars else []
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in [*row, *bar]) + " |"
        if not index:
            yield "|" + "|".join("---:" if number else "---" for number in [*numbers, *[False] * len(bar)]) + "|"


def _number_columns(block: Block) -> list[bool]:
    return [all(is_number(row[column]) for row in block.rows[1:]) for column in range(len(block.rows[0]))]
