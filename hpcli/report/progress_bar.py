"""A bar for commands that go through many things."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class ProgressBar:
    """A bar on a terminal, on standard error; nothing elsewhere. Call it with how many are done, of how many, and what is next."""

    def __init__(self, total: int, *, json: bool) -> None:
        self.total = total
        self.bar: Any = None
        self.shown = sys.stderr.isatty() and not json

    def __enter__(self) -> Self:
        if self.shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("starting", total=self.total)
        return self

    def __call__(self, done: int, total: int, what: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=what)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
