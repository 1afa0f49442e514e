"""A configuration file's bytes to text, with every way this fails as one message."""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from pathlib import Path

from hpcli.config.errors import Problem
from hpcli.config.tree import Unreadable

MAX_BYTES = 128 * 1024
PIPE_SECONDS = 10
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufeff\uff00-\ufffd\U00010000-\U0010ffff]")


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        Unreadable: no such file, not a file, not permitted, too large, or not UTF-8 text.
    """
    name = str(path)

    def fail(message: str, line: int | None = None, column: int | None = None) -> Unreadable:
        return Unreadable(Problem(name, line, column, "", message))

    try:
        data = _read_bytes(path)
    except FileNotFoundError:
        raise fail(f"there is no such file{_neighbours(path)}") from None
    except IsADirectoryError:
        raise fail("this is a directory, not a configuration file") from None
    except PermissionError:
        raise fail("this file may not be read; check its permissions") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise fail(f"this file cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise fail(f"larger than {MAX_BYTES // 1024} KiB, which no configuration is")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise fail("not UTF-8 text but UTF-16; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        raise fail(f"not UTF-8 text: byte 0x{data[error.start]:02x}", line, column) from None
    bad = _UNPRINTABLE.search(text)
    if bad:
        line, column = text.count("\n", 0, bad.start()) + 1, bad.start() - text.rfind("\n", 0, bad.start())
        raise fail(f"control character U+{ord(bad[0]):04X}, which no text file has", line, column)
    return text


def _read_bytes(path: Path) -> bytes:
    # Without O_NONBLOCK, opening a named pipe that nobody writes to would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not select.select([descriptor], [], [], PIPE_SECONDS)[0]:
            raise TimeoutError(errno.ETIMEDOUT, f"a named pipe into which nothing was written for {PIPE_SECONDS} s")
        os.set_blocking(descriptor, True)
        return file.read(MAX_BYTES + 1)


def _neighbours(path: Path) -> str:
    """What YAML files there are instead, for a name that was mistyped."""
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")][:1000]
    except OSError:
        return ""
    close = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
