"""What is wrong with a configuration, one problem a line, fit for the terminal as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SHOWN_PROBLEMS = 50
SHOWN_CHARACTERS = 60


def one_line(text: str) -> str:
    """Text that prints as one line on any terminal: control characters and lone surrogates are escaped."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """At most about `limit` characters of `text`, on one line."""
    if len(text) <= limit:
        return one_line(text)
    return f"{one_line(text[: limit - 15])}... ({len(text)} characters)"


def show_key(part: str) -> str:
    """One part of a dotted key; quoted unless it is a plain word."""
    return part if re.fullmatch(r"[A-Za-z0-9_\-]{1,60}", part) else f'"{shorten(part)}"'


def dotted(path: Iterable[str | int]) -> str:
    """`('optimizer', 'betas', 1)` as `optimizer.betas[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{show_key(part)}" if text else show_key(part)
    return text


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    `file` is the configuration file as the user named it, or the option that holds the value, such as
    `--set training.steps=0`; `line` and `column` count from 1; `key` is dotted, empty for a whole file.
    """

    file: str
    line: int | None
    column: int | None
    key: str
    message: str

    def __str__(self) -> str:
        place = one_line(self.file)
        if self.line is not None:
            place += f":{self.line}" if self.column is None else f":{self.line}:{self.column}"
        return one_line(f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}")


class ConfigError(Exception):
    """A configuration that cannot be used; the text lists every problem, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        ordered = sorted(
            dict.fromkeys(problems),
            key=lambda p: (p.file.startswith("--"), 0 if p.line is None else p.line, p.column or 0),
        )
        super().__init__(ordered)
        self.problems: list[Problem] = ordered

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return type(self), (self.problems,)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:SHOWN_PROBLEMS]]
        hidden = len(self.problems) - len(lines)
        if hidden:
            lines.append(f"{one_line(self.problems[-1].file)}: and {hidden} more problems")
        return "\n".join(lines)
