"""Reads Python stacks: which collective a rank waits in, and where a hung one is."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple


class Frame(NamedTuple):
    file: str
    line: int
    function: str


# The first pattern found in a function's name, asked from the innermost frame outwards.
_COLLECTIVES = (
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("all_reduce", "all-reduce"),
    ("allreduce", "all-reduce"),
    ("all_to_all", "all-to-all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("batch_isend_irecv", "send/receive"),
    ("isend", "send"),
    ("irecv", "receive"),
    ("send", "send"),
    ("recv", "receive"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    # FSDP2 waits for what it has started elsewhere
    ("wait_for_unshard", "all-gather"),
    ("wait_all_gather", "all-gather"),
    ("foreach_reduce", "reduce-scatter"),
    # pipelining waits for the stage before or after
    ("wait_batch_p2p", "send/receive of a pipeline stage"),
    ("_assert_unsharded", "all-gather"),
    ("init_process_group", "the start of the process group"),
    ("new_group", "the start of a process group"),
    ("rendezvous", "the start of the process group"),
)
_DISTRIBUTED = "torch/distributed/"
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/torch/|^<frozen")
_DUMP_LINE = re.compile(r'\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def frames_of(trace: TracebackType | None) -> list[Frame]:
    """Frames of a traceback, innermost first."""
    return [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in reversed(list(traceback.walk_tb(trace)))
    ]


def frames_of_dump(text: str) -> list[Frame]:
    """Frames of the last stack that faulthandler wrote into `text`, innermost first."""
    found: list[Frame] = []
    for line in text.splitlines():
        if line.startswith(("Current thread", "Thread", "Stack")):
            found = []
        elif match := _DUMP_LINE.match(line):
            found.append(Frame(match["file"], int(match["line"]), match["function"]))
    return found


def collective(frames: Sequence[Frame]) -> str | None:
    """The collective that the innermost frames of torch.distributed are in, or None."""
    for frame in frames:
        if _DISTRIBUTED not in frame.file:
            continue
        for pattern, name in _COLLECTIVES:
            if pattern in frame.function:
                return name
    return None


def place(frames: Sequence[Frame]) -> str | None:
    """The innermost frame in the words of a message, outside installed libraries if there is one."""
    for frame in frames:
        if not _LIBRARY.search(frame.file):
            return f"{frame.file}:{frame.line} ({frame.function})"
    return f"{frames[0].file}:{frames[0].line} ({frames[0].function})" if frames else None
