"""What a person sees: on a terminal a live status line and tables, on a pipe plain lines."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcli.report.errors import cannot_write
from hpcli.report.formats import (
    coefficient_text,
    count_text,
    duration_text,
    loss_text,
    norm_text,
    rate_text,
)
from hpcli.report.header import header_lines
from hpcli.report.json_lines import Event
from hpcli.report.tables import WIDTH, ReportConsole, norm_table, plain_console

PLAIN_LINES = 40
"""About how many step lines a run prints on a pipe; long steps get one every ``QUIET_SECONDS`` besides."""
QUIET_SECONDS = 15.0
REFRESH_SECONDS = 0.1
SKIPS_IN_FULL = 5


def is_interactive(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown", "")


class ConsoleReport:
    """Renders events for a person.

    Args:
        stream: where to; by default standard output.
        clock: seconds from any fixed point, for time left and thinning.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        stream = sys.stdout if stream is None else stream
        self._stream = stream
        self._clock = clock
        self._live: Live | None = None
        self._status: _Status | None = None
        self._interactive = is_interactive(stream)
        if self._interactive:
            self._console = ReportConsole(file=stream, highlight=False, markup=False, emoji=False)
        else:
            self._console = plain_console(stream, _columns_wanted())
        self._steps = 0
        self._arrivals: deque[float] = deque(maxlen=50)
        self._last: Event | None = None
        self._printed_step = 0
        self._printed_at = 0.0
        self._table_step = 0
        self._skips = 0
        self._saved = ""

    def wait(self) -> None:
        """On a terminal, say that the ranks are starting, until the first event; importing a framework takes seconds."""
        if self._interactive:
            text = Text("starting the ranks ...", no_wrap=True, overflow="crop")
            self._live = Live(
                text,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)

    def handle(self, event: Event) -> None:
        handler = {
            "start": self._start,
            "step": self._step,
            "norm_table": self._table,
            "checkpoint": self._checkpoint,
            "end": self._end,
            "stopped": self._stopped,
        }.get(event["event"])
        if handler is None:
            return
        try:
            handler(event)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise cannot_write("to", "standard output", error) from error

    def close(self) -> None:
        """Give the terminal back: cursor shown, status line left as it last was."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _line(self, text: str, style: str = "") -> None:
        """Print one line; on a pipe never folded, for the reader may be a program."""
        self._console.print(Text(text, style=style), soft_wrap=not self._interactive)

    def _start(self, event: Event) -> None:
        self.close()
        self._steps = int(event.get("steps") or 0)
        for number, line in enumerate(header_lines(event)):
            self._line(line, "bold" if number == 0 else "")
        self._arrivals.append(self._clock())
        if self._interactive:
            self._status = _Status(self._steps)
            self._live = Live(
                self._status,
                console=self._console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)

    def _step(self, event: Event) -> None:
        now = self._clock()
        self._arrivals.append(now)
        self._last = event
        if event.get("skipped"):
            self._skip(event)
        if self._live is not None and self._status is not None:
            self._status.show(event, self._time_left())
            if now - self._printed_at >= REFRESH_SECONDS or event["step"] >= self._steps:
                self._printed_at = now
                self._live.refresh()
        elif not self._interactive and self._is_due(event["step"], now):
            self._print_step(event, now)

    def _is_due(self, step: int, now: float) -> bool:
        every = round_step(self._steps / PLAIN_LINES)
        chosen = step in (1, self._steps, self._table_step) or step % every == 0 or not self._printed_step
        return chosen or now - self._printed_at >= QUIET_SECONDS

    def _print_step(self, event: Event, now: float) -> None:
        self._printed_step, self._printed_at = event["step"], now
        self._line("  ".join(step_parts(event, self._steps, self._time_left()).values()))

    def _skip(self, event: Event) -> None:
        self._skips += 1
        if self._skips > SKIPS_IN_FULL and self._skips % 10:
            return
        reason = event.get("skip_reason") or "the gradient norm is not finite"
        so_far = f" ({self._skips} skipped so far)" if self._skips > 1 else ""
        self._line(
            f"SKIPPED step {event['step']}: {reason}; the parameters are unchanged{so_far}", "bold red"
        )

    def _table(self, event: Event) -> None:
        step = self._table_step = event["step"]
        title = f"Gradient norm of every rank, step {step}"
        if self._last is not None and self._last["step"] == step:
            title += f"  (loss {loss_text(self._last.get('loss'))})"
            if not self._interactive and self._printed_step != step:
                self._print_step(self._last, self._clock())
        self._line("")
        table = norm_table(event["rows"], title, self._console.width)
        if self._interactive:
            self._console.print(table)
        else:
            with self._console.capture() as captured:
                self._console.print(table)
            for line in captured.get().splitlines():
                self._line(line.rstrip())
        self._line(event["verdict"], "bold" if event["agree"] else "bold red")
        self._line("")

    def _checkpoint(self, event: Event) -> None:
        self._saved = str(event["path"])

    def _end(self, event: Event) -> None:
        if self._live is not None:
            self._live.refresh()
        self.close()
        self._line(
            f"done: {count_text(event['steps'], 'step')} in {duration_text(event.get('seconds'))}, "
            f"loss {loss_text(event.get('first_loss'))} -> {loss_text(event.get('last_loss'))}",
            "bold",
        )
        self._files(event)

    def _stopped(self, event: Event) -> None:
        self.close()
        self._line(f"stopped after step {event['step']} of {event['steps']}", "bold")
        self._files(event)

    def _files(self, event: Event) -> None:
        if self._skips:
            self._line(f"skipped: {count_text(self._skips, 'step')} with a gradient norm that was not finite")
        saved = {"checkpoint": self._saved} if self._saved else {}
        for name, path in {**(event.get("files") or {}), **saved}.items():
            self._line(f"{name + ':':<12} {path}")

    def _time_left(self) -> float | None:
        """Steps to go times the mean of the latest steps. The first step, which warms up, is left out when it can be."""
        if self._last is None or len(self._arrivals) < 2:
            return None
        times = list(self._arrivals)[1 if len(self._arrivals) > 2 else 0 :]
        return max(0, self._steps - self._last["step"]) * (times[-1] - times[0]) / (len(times) - 1)


def step_parts(event: Mapping[str, Any], steps: int, left: float | None) -> dict[str, str]:
    """A step in words, by name, so that a narrow terminal can leave the less important ones out."""
    parts = {
        "step": f"step {event['step']}/{steps}",
        "loss": f"loss {loss_text(event.get('loss'))}",
        "norm": f"norm {norm_text(event.get('grad_norm'))}",
        "clip": f"clip {coefficient_text(event.get('clip_coefficient'))}",
        "rate": rate_text(event.get("tokens_per_second")),
        "left": f"{duration_text(left)} left",
    }
    if event.get("loss_scale"):
        parts["scale"] = f"scale {event['loss_scale']:g}"
    if event.get("skipped"):
        parts["skipped"] = "SKIPPED"
    return parts


def round_step(wanted: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least ``wanted``."""
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale >= wanted:
                return factor * scale
        scale *= 10


class _Status:
    """The line at the bottom of the terminal. It always takes exactly one line, whatever the terminal's width."""

    _LEAST_WANTED = ("rate", "clip", "left", "norm", "loss", "skipped")
    _BAR = (8, 30)

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._parts = {"step": f"step 0/{steps}"}

    def show(self, event: Event, left: float | None) -> None:
        self._done = event["step"]
        self._parts = step_parts(event, self._steps, left)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = min(options.max_width, WIDTH + 20) - 1
        parts = dict(self._parts)
        for name in self._LEAST_WANTED:
            if len("  ".join(parts.values())) <= room:
                break
            parts.pop(name, None)
        text = Text("  ".join(parts.values()), no_wrap=True, overflow="crop")
        bar = min(room - len(text) - 2, self._BAR[1])
        if bar < self._BAR[0]:
            text.truncate(room, overflow="crop")
            yield text
            return
        line = Table.grid(padding=(0, 2))
        line.add_row(ProgressBar(total=max(1, self._steps), completed=self._done, width=bar), text)
        yield line


def _columns_wanted() -> int:
    """The width for a stream without one of its own: COLUMNS where it is set, else that of a full table."""
    try:
        return max(20, int(os.environ["COLUMNS"]))
    except (KeyError, ValueError):
        return WIDTH
