"""One receiver for the events of a run, which hands each to everything that reports it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from hpcli.report.console import ConsoleReport
from hpcli.report.errors import ReportError
from hpcli.report.json_lines import Event, JsonLines
from hpcli.report.metrics import MetricsFile
from hpcli.report.plot import FILE_NAME as PLOT_NAME
from hpcli.report.plot import History, draw
from hpcli.report.tensorboard import TensorBoardFile
from hpcli.report.verdict import norm_verdict

if TYPE_CHECKING:
    from typing_extensions import Self

TENSORBOARD_FOLDER = "tensorboard"


class Reporter(Protocol):
    """Something that renders or records events."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


class LoggingChoices(Protocol):
    """The part of the configuration that says what is recorded."""

    @property
    def jsonl(self) -> bool: ...

    @property
    def tensorboard(self) -> bool: ...

    @property
    def plot(self) -> bool: ...


class Sink:
    """Receives the events of one run in order. Use it as a context manager, or call ``close``.

    Attributes:
        failed: ranks disagreed on a norm, or a file could not be written at the end: the command must exit 1. It
            can still turn true in ``close``.
    """

    def __init__(
        self,
        screen: Reporter,
        records: list[Reporter],
        *,
        files: dict[str, Path],
        plot: Path | None,
        max_norm: float | None,
        errors: TextIO,
        past: Sequence[Event] = (),
    ) -> None:
        self.failed = False
        self._screen = screen
        self._records = records
        self._files = files
        self._plot = plot
        self._max_norm = max_norm
        self._errors = errors
        self._history = History()
        for event in past:
            self._history.add(event)
        self._start: Event | None = None
        self._finished = False

    def handle(self, event: Event) -> None:
        """Report one event.

        Raises:
            ReportError: it could not be written. The run should end: what cannot be recorded is not worth computing.
            BrokenPipeError: whoever read standard output has gone.
        """
        event = dict(event)
        kind = event["event"]
        if kind == "start":
            self._start = event
        elif kind == "step":
            self._history.add(event)
        elif kind == "norm_table":
            event["agree"], event["verdict"] = norm_verdict(event["rows"])
            self.failed = self.failed or not event["agree"]
        elif kind == "end":
            self._finished = True
            event["files"] = self._final_files()
        # To disk first: what a person has seen must also be on record.
        for reporter in list(self._records):
            try:
                reporter.handle(event)
            except ReportError:
                self._records.remove(reporter)
                raise
        self._screen.handle(event)

    def close(self) -> None:
        """Finish the files. A run that was cut short still gets its plot, and a ``stopped`` record. Never raises."""
        try:
            if self._start is not None and not self._finished:
                self._finished = True
                self._stop(self._start)
        finally:
            for reporter in (self._screen, *self._records):
                # A terminal that has gone cannot be tidied.
                with suppress(OSError):
                    reporter.close()

    def _stop(self, start: Event) -> None:
        step = self._history.steps[-1] if self._history.steps else 0
        event = {"event": "stopped", "step": step, "steps": start.get("steps"), "files": self._final_files()}
        for reporter in (*self._records, self._screen):
            try:
                reporter.handle(event)
            except (ReportError, OSError):
                # The run is over for some other reason, which the caller reports.
                self.failed = True

    def _final_files(self) -> dict[str, str]:
        """Draw the plot; the paths of all that a reader may want to open."""
        files = {name: str(path) for name, path in self._files.items()}
        if self._plot is not None and self._history.steps:
            start = self._start or {}
            title = ", ".join(str(start[key]) for key in ("config_file", "model") if start.get(key))
            try:
                draw(self._history, self._plot, title or "training", self._max_norm)
                files["plot"] = str(self._plot)
            except ReportError as error:
                self.failed = True
                # Take the live line off the terminal before something else writes there.
                self._screen.close()
                print(f"error: {error}", file=self._errors, flush=True)
        return files

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def make_sink(
    output: Path | None,
    *,
    json: bool = False,
    logging: LoggingChoices | None = None,
    max_norm: float | None = None,
    resumed_step: int | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> Sink:
    """The sink for one run.

    Args:
        output: the folder of the run, created if need be; without one nothing is recorded.
        json: standard output gets every event as JSON, instead of text for a person.
        logging: which files are written; by default metrics and plot.
        max_norm: drawn into the plot as the norm above which gradients are clipped.
        resumed_step: the run goes on after this step: records of later ones in ``output`` are taken back.
        stdout, stderr: the streams; by default the process's own.

    Raises:
        ReportError: a file cannot be opened, or a package that was asked for is missing.
    """
    stdout = sys.stdout if stdout is None else stdout
    records: list[Reporter] = []
    files: dict[str, Path] = {}
    plot = None
    past: list[Event] = []
    if output is not None:
        if logging is None or logging.jsonl:
            metrics = MetricsFile(output, resumed_step)
            past = metrics.past
            records.append(metrics)
            files["metrics"] = metrics.path
        if logging is not None and logging.tensorboard:
            board = TensorBoardFile(output / TENSORBOARD_FOLDER)
            records.append(board)
            files["tensorboard"] = board.folder
        if logging is None or logging.plot:
            plot = output / PLOT_NAME
    screen: Reporter
    if json:
        screen = JsonLines(stdout)
    else:
        screen = console = ConsoleReport(stdout)
        console.wait()
    return Sink(
        screen,
        records,
        files=files,
        plot=plot,
        max_norm=max_norm,
        errors=sys.stderr if stderr is None else stderr,
        past=past,
    )
