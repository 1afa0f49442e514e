"""The heartbeat board: one small shared file in which every rank notes where it is.

The board outlives its writer, so the parent can say in which step and phase a killed or stopped rank was.
Layout: one 64-byte header (byte 0 is the parent's request to stop), then one 64-byte record per rank. A
record has a single writer and a reader that only reports, so no lock is needed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

PHASES = ("start", "build", "data", "forward", "backward", "gradient norm", "optimizer", "report", "checkpoint", "finish")
PHASE_INDEX = {phase: index for index, phase in enumerate(PHASES)}

RECORD_SIZE = 64
# beats, step, phase, time.monotonic() of the last beat (one clock for all processes of a machine)
RECORD = struct.Struct("=QqId")


class Beat(NamedTuple):
    """What a rank noted last; `beats` 0 means that it has not noted anything yet."""

    beats: int
    step: int
    phase: str
    time: float

    @property
    def place(self) -> str:
        """Where the rank was, as it reads in a message: "in step 4 (forward)" or "before step 1 (build)"."""
        return f"in step {self.step} ({self.phase})" if self.step > 0 else f"before step 1 ({self.phase})"


class Board:
    """The mapped file. `create` for the parent, the constructor for a rank."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, world_size: int) -> Board:
        """Create the file; its blocks are allocated now, because a full disk met later would be a SIGBUS."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RECORD_SIZE * (world_size + 1))
        finally:
            os.close(descriptor)
        return cls(path)

    def read(self, rank: int) -> Beat:
        beats, step, phase, seconds = RECORD.unpack_from(self.memory, RECORD_SIZE * (rank + 1))
        return Beat(beats, step, PHASES[phase] if phase < len(PHASES) else PHASES[0], seconds)

    @property
    def stop_requested(self) -> bool:
        return self.memory[0] != 0

    def request_stop(self) -> None:
        self.memory[0] = 1

    def close(self) -> None:
        self.memory.close()


class Pulse:
    """The writing side of one record, a few hundred nanoseconds per beat."""

    def __init__(self, memory: mmap.mmap | bytearray, offset: int) -> None:
        self._memory = memory
        self._offset = offset
        self._beats = 0

    @classmethod
    def on_board(cls, board: Board, rank: int) -> Pulse:
        return cls(board.memory, RECORD_SIZE * (rank + 1))

    @classmethod
    def private(cls) -> Pulse:
        """A pulse that nobody watches, for a rank under another launcher."""
        return cls(bytearray(RECORD_SIZE), 0)

    def beat(self, step: int, phase: str) -> None:
        self._beats += 1
        RECORD.pack_into(self._memory, self._offset, self._beats, step, PHASE_INDEX[phase], time.monotonic())

    def read(self) -> Beat:
        beats, step, phase, seconds = RECORD.unpack_from(self._memory, self._offset)
        return Beat(beats, step, PHASES[phase], seconds)
