"""The life of one local rank, from the fork to its end."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpcli.launch.channel import LineWriter, Message
from hpcli.launch.context import RankContext
from hpcli.launch.heartbeat import Board, Pulse
from hpcli.launch.process import set_process_name
from hpcli.launch.stacks import Frame, frames_of

# Asks a rank for its Python stack. The handler is C code, so it answers inside a hung C call as well.
DUMP_STACK = signal.SIGRTMIN + 7
_LONGEST_TEXT = 200_000


@dataclass(frozen=True)
class RankRequest:
    """What the parent sends for one rank; the descriptors are messages, output, release."""

    rank: int
    world_size: int
    folder: str
    target: str
    timeout_seconds: float
    descriptors: tuple[int, ...]


class RunFolder:
    """Names inside the private folder of one set of ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.payload = path / "payload.json"
        self.board = path / "heartbeat"
        self.store = path / "store"

    def stack(self, rank: int) -> Path:
        """Where faulthandler writes the rank's stack when it crashes or is asked for it."""
        return self.path / f"stack-{rank}"


def run_rank(request: RankRequest) -> NoReturn:
    messages, output, release = request.descriptors
    _redirect(output)
    set_process_name(f"hpcli:rank{request.rank}")
    folder = RunFolder(Path(request.folder))
    writer = LineWriter(messages)
    try:
        stack_file = open(folder.stack(request.rank), "w")  # noqa: SIM115 (faulthandler needs it open for good)
        faulthandler.enable(stack_file, all_threads=True)  # gloo aborts in a thread that has no Python stack
        faulthandler.register(DUMP_STACK, stack_file, all_threads=False)
        os.environ.update(
            RANK=str(request.rank),
            WORLD_SIZE=str(request.world_size),
            LOCAL_RANK=str(request.rank),
            LOCAL_WORLD_SIZE=str(request.world_size),
        )
        board = Board(folder.board)
        context = RankContext(
            rank=request.rank,
            world_size=request.world_size,
            local_rank=request.rank,
            local_world_size=request.world_size,
            host=socket.gethostname(),
            init_method=folder.store.as_uri(),
            store_path=str(folder.store),
            timeout_seconds=request.timeout_seconds,
            launcher="local",
            pulse=Pulse.on_board(board, request.rank),
            send=lambda event: writer.send({"event": event}),
            stop_requested=lambda: board.stop_requested,
        )
        context.progress(0, "start")
        load_function(request.target)(context, json.loads(folder.payload.read_bytes()))
    except BaseException as error:  # noqa: BLE001 (whatever ends a rank early is its failure)
        _leave(writer, {"failed": describe(error)}, 1)
    _flush()
    try:
        writer.send({"done": True})
        # A rank that closes its sockets early can break a peer's last collective: all leave together.
        os.read(release, 1)
    finally:
        os._exit(0)


def load_function(name: str) -> Any:
    """The function that "package.module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def describe(error: BaseException) -> Message:
    """An exception as data: type, message, traceback without the launcher's own frames, and the frames."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 (a user's class)
        message = "(its message cannot be shown)"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else (0 if error.code is None else 1)
        message = f"left with exit code {code} before finishing" + (
            f": {error.code}" if isinstance(error.code, str) else ""
        )
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    frames: list[Frame] = frames_of(trace)
    return {
        "type": type(error).__name__,
        "message": message[:_LONGEST_TEXT],
        "traceback": "".join(traceback.format_exception(type(error), error, trace))[-_LONGEST_TEXT:],
        "frames": [list(frame) for frame in frames[:200]],
    }


_OWN_FILES = (__file__, str(Path(__file__).with_name("joined.py")))


def _redirect(output: int) -> None:
    """Both streams into the one pipe that the parent relays line by line."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # new objects: the old ones belong to the server's log file
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _leave(writer: LineWriter, message: Message, code: int) -> NoReturn:
    try:
        _flush()
        writer.send(message)
    finally:
        os._exit(code)
