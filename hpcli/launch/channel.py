"""JSON between processes: lines over pipes, packets over the server's control socket.

Nothing is pickled: what arrives can only be data.
"""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

# A control packet must fit the socket's buffer; whatever may be longer (payloads, tracebacks) is cut or goes
# through a file.
PACKET_SIZE = 1 << 16
_READ_SIZE = 1 << 18


class LineWriter:
    """Writes one message per line to a blocking descriptor, whole messages in order from any thread."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises TypeError or ValueError for what JSON cannot hold, before anything is written."""
        view = memoryview(json.dumps(message).encode() + b"\n")
        with self._lock:
            while view:
                view = view[os.write(self.descriptor, view) :]


class LineReader:
    """Collects lines from a non-blocking descriptor."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.ended = False
        self._parts: list[bytes] = []

    def read(self) -> list[bytes]:
        """The lines completed by what can be read now; at the end also what was left without a newline."""
        lines: list[bytes] = []
        while not self.ended:
            try:
                data = os.read(self.descriptor, _READ_SIZE)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                rest = b"".join(self._parts)
                self._parts = []
                if rest:
                    lines.append(rest)
                break
            *complete, rest = data.split(b"\n")
            for line in complete:
                lines.append(b"".join((*self._parts, line)))
                self._parts = []
            if rest:
                self._parts.append(rest)
            if len(lines) >= 1000:
                break  # let the caller look after the other ranks
        return lines

    def close(self) -> None:
        os.close(self.descriptor)


def send_packet(control: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    control.sendmsg([data], rights)


def receive_packet(control: socket.socket, flags: int = 0) -> tuple[Message | None, list[int]]:
    """The next packet and the descriptors that came with it; None when the other side has gone."""
    received = array.array("i")
    try:
        data, ancillary, _, _ = control.recvmsg(
            PACKET_SIZE * 2, socket.CMSG_LEN(16 * received.itemsize), flags
        )
    except ConnectionResetError:
        return None, []
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
    return (json.loads(data) if data else None), list(received)
