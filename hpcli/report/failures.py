"""How the command line ends when something goes wrong: one message, an exit code, no traceback."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

FAILED = 1
WRONG_REQUEST = 2
INTERRUPTED = 130

REMEDIES = {
    "torch": "install it with: pip install 'torch==2.13.*'",
    "mindspore": "install it with: pip install 'hyper-parallel[mindspore]'",
    "torch_npu": "install CANN and then: pip install 'hyper-parallel[npu]'",
}


def explain(error: Exception, *, debug: bool) -> int:
    """Print what ``error`` means to the user; the exit code to leave with. With ``debug``, the traceback first."""
    if debug:
        traceback.print_exception(error)
        if details := getattr(error, "details", None):
            _say(str(details))
    lines, code = _message(error)
    for line in lines:
        _say(f"error: {line}")
    if isinstance(error, OSError):
        silence(sys.stdout)
    return code


class EndedBySignal(BaseException):
    """SIGTERM or SIGHUP: the run ends as at Ctrl-C, records and all. (A KeyboardInterrupt would lose its number in typer.)"""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """What SIGTERM and SIGHUP do inside :func:`signals_end_the_run`."""

    def __init__(self) -> None:
        self._ask: Callable[[], None] | None = None
        self._asked_by: int | None = None

    def ask_first(self, ask: Callable[[], None]) -> None:
        """From now on the first SIGTERM only asks the run to end, by calling ``ask``; a second one ends it."""
        self._ask = ask

    def raise_if_asked(self) -> None:
        """Raise EndedBySignal where the run has ended because it was asked to."""
        if self._asked_by is not None:
            raise EndedBySignal(self._asked_by)

    def handle(self, number: int, frame: object) -> None:
        if number != signal.SIGTERM or self._ask is None or self._asked_by is not None:
            raise EndedBySignal(number)
        self._asked_by = number
        self._ask()


@contextmanager
def signals_end_the_run() -> Iterator[Signals]:
    """Inside, SIGTERM (a scheduler's) and SIGHUP (a lost terminal's, unless ignored) raise EndedBySignal."""
    handler = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    signals = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, handler.handle)
    try:
        yield handler
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


def interrupted(cause: BaseException | None = None) -> int:
    """Ctrl-C or another signal: say so, and leave with the shell's code for it."""
    if isinstance(cause, EndedBySignal):
        _say(f"ended by {signal.Signals(cause.number).name}")
        return 128 + cause.number
    _say("interrupted")
    return INTERRUPTED


def tolerate_any_text(*streams: TextIO) -> None:
    """Escape what a stream's encoding cannot express, so that no file name can end a run."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def replace_closed_streams() -> None:
    """Where the shell closed standard output or error (``>&-``), what is said there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until the process ends)


def silence(stream: TextIO) -> None:
    """Send what a stream still holds nowhere, so that Python does not complain about it on exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _message(error: Exception) -> tuple[list[str], int]:
    from hpcli.checkpoint.errors import CheckpointError
    from hpcli.config.errors import ConfigError
    from hpcli.launch.errors import LaunchError
    from hpcli.report.errors import ReportError

    if isinstance(error, ConfigError):
        return str(error).splitlines(), WRONG_REQUEST
    if isinstance(error, CheckpointError):  # before the start: that of a rank comes as a LaunchError
        return [str(error)], WRONG_REQUEST
    if isinstance(error, ReportError | LaunchError):
        return [str(error)], FAILED
    # A mistake in the options themselves. typer's class for it has moved between versions; its shape has not.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", "hpcli")
        message = error.format_message().rstrip(".")
        return [f"{message}{'' if message.endswith('?') else '.'} See: {command} --help"], WRONG_REQUEST
    if isinstance(error, ModuleNotFoundError) and error.name in REMEDIES:
        return [f"{error.name} is not installed; {REMEDIES[error.name]}   (hpcli doctor shows more)"], FAILED
    if isinstance(error, OSError) and error.strerror:
        return [f"{error.strerror}: {error.filename}" if error.filename else error.strerror], FAILED
    kind = type(error).__name__
    return [f"internal error: {kind}: {error}; run again with --debug to see where"], FAILED
