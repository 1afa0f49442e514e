"""One set of local ranks, seen from the parent: its pipes, its heartbeats and its end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hpcli.launch.channel import LineReader, Message
from hpcli.launch.diagnosis import Ending, Silent, explain, is_settled
from hpcli.launch.errors import LaunchError, RankFailure
from hpcli.launch.heartbeat import Board
from hpcli.launch.output import OutputRelay
from hpcli.launch.process import is_stopped
from hpcli.launch.rank import DUMP_STACK, RunFolder
from hpcli.launch.stacks import Frame, frames_of_dump

_TICK_SECONDS = 0.1
# The ranks' own timeout, in their process group, speaks first; it knows the collective.
_WATCHDOG_MARGIN_SECONDS = 2.0
_END_SECONDS = 3.0
_LEAVE_SECONDS = 5.0
_STACK_SECONDS = 0.3


class ServerLink(Protocol):
    """What a set needs of the rank server."""

    def fork(self, request: Message, descriptors: tuple[int, ...]) -> int: ...
    def notices(self) -> list[Message]: ...
    def kill_ranks(self) -> None: ...
    def fileno(self) -> int: ...


class _Rank:
    def __init__(self, rank: int, pid: int, messages: LineReader, output: LineReader) -> None:
        self.rank = rank
        self.pid = pid
        self.messages = messages
        self.output = output
        self.done = False
        self.failed = False
        self.ended = False
        self.beats = 0


class RankSet:
    """Starts the ranks and watches them to their end; `close` in every case."""

    def __init__(
        self,
        link: ServerLink,
        folder: Path,
        target: str,
        world_size: int,
        timeout_seconds: float,
        on_event: Callable[[dict[str, Any]], None],
        on_output: Callable[[int, str], None],
    ) -> None:
        self.link = link
        self.folder = RunFolder(folder)
        self.target = target
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.on_event = on_event
        self.relay = OutputRelay(on_output)
        self.board = Board.create(self.folder.board, world_size)
        self.ranks: list[_Rank] = []
        self.endings: list[Ending] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(link.fileno(), selectors.EVENT_READ)
        self.release_read, self.release_write = os.pipe()

    # -- start -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        for rank in range(self.world_size):
            messages_read, messages_write = os.pipe()
            output_read, output_write = os.pipe()
            request = {
                "rank": rank,
                "world_size": self.world_size,
                "folder": str(self.folder.path),
                "target": self.target,
                "timeout_seconds": self.timeout_seconds,
            }
            try:
                pid = self.link.fork(request, (messages_write, output_write, self.release_read))
            except BaseException:
                os.close(messages_read)
                os.close(output_read)
                raise
            finally:
                os.close(messages_write)
                os.close(output_write)
            entry = _Rank(rank, pid, LineReader(messages_read), LineReader(output_read))
            self.ranks.append(entry)
            self.selector.register(messages_read, selectors.EVENT_READ, (entry, entry.messages))
            self.selector.register(output_read, selectors.EVENT_READ, (entry, entry.output))

    # -- the loop --------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Return when every rank has finished; raise RankFailure when one cannot."""
        last_sign = last_turn = time.monotonic()
        while not all(entry.done for entry in self.ranks):
            heard = self.turn(_TICK_SECONDS)
            now = time.monotonic()
            if now - last_turn > 1.0:
                last_sign += now - last_turn  # this process or the whole machine was held up, not the ranks
            last_turn = now
            if heard or self.beats_moved():
                last_sign = now
            running = [entry for entry in self.ranks if not (entry.done or entry.failed or entry.ended)]
            if is_settled(self.endings, len(running), now):
                raise self.failure(running, now)
            if not self.endings and now - last_sign > self.timeout_seconds + _WATCHDOG_MARGIN_SECONDS:
                raise self.failure(running, now)
        self.leave()

    def turn(self, wait: float) -> bool:
        """Handle all that has arrived: endings first, then messages, then output; whether a rank was heard."""
        ready = self.selector.select(wait)
        heard = False
        for notice in self.link.notices():
            self.on_ended(notice)
        for key, _ in ready:
            if key.data and key.data[1] is key.data[0].messages and not key.data[0].ended:
                heard |= self.read_messages(key.data[0])
        now = time.monotonic()
        for key, _ in ready:
            if key.data and key.data[1] is key.data[0].output and not key.data[0].ended:
                self.read_output(key.data[0], now)
        if not self.endings:
            self.relay.flush(now)
        return heard

    def read_messages(self, entry: _Rank) -> bool:
        lines = entry.messages.read()
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # the rank was killed while it wrote
            if "event" in message:
                self.on_event(message["event"])
            elif "done" in message:
                entry.done = True
            elif "failed" in message:
                self.on_exception(entry, message["failed"])
        self.forget_if_ended(entry.messages)
        return bool(lines)

    def read_output(self, entry: _Rank, now: float) -> None:
        self.relay.feed(entry.rank, entry.output.read(), now)
        self.forget_if_ended(entry.output)

    def forget_if_ended(self, reader: LineReader) -> None:
        if reader.ended:
            with contextlib.suppress(KeyError):
                self.selector.unregister(reader.descriptor)

    def on_exception(self, entry: _Rank, failed: Message) -> None:
        entry.failed = True
        self.endings.append(
            Ending(
                rank=entry.rank,
                at=time.monotonic(),
                beat=self.board.read(entry.rank),
                type=failed["type"],
                message=failed["message"],
                traceback=failed["traceback"],
                frames=tuple(Frame(*frame) for frame in failed["frames"]),
            )
        )

    def on_ended(self, notice: Message) -> None:
        entry = self.ranks[notice["ended"]]
        if entry.ended or entry.pid != notice["pid"]:
            return
        while self.read_messages(entry):
            pass
        now = time.monotonic()
        self.read_output(entry, now)
        entry.ended = True
        for reader in (entry.messages, entry.output):
            with contextlib.suppress(KeyError):
                self.selector.unregister(reader.descriptor)
        if entry.done or entry.failed:
            return
        stack = self.read_stack(entry.rank)
        self.endings.append(
            Ending(
                rank=entry.rank,
                at=now,
                beat=self.board.read(entry.rank),
                status=notice["status"],
                output=tuple(self.relay.take(entry.rank)[-50:]),
                frames=tuple(frames_of_dump(stack)),
            )
        )

    def beats_moved(self) -> bool:
        moved = False
        for entry in self.ranks:
            beats = self.board.read(entry.rank).beats
            moved |= beats != entry.beats
            entry.beats = beats
        return moved

    # -- the end ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """All ranks have finished: let them leave together."""
        os.close(self.release_write)
        self.release_write = -1
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not all(entry.ended for entry in self.ranks) and time.monotonic() < deadline:
            self.turn(_TICK_SECONDS)
        self.relay.flush(float("inf"))

    def failure(self, running: list[_Rank], now: float) -> RankFailure:
        for entry in self.ranks:
            if not entry.ended:
                self.read_messages(entry)  # what was reported before the failure still counts
        running = [entry for entry in running if not (entry.done or entry.failed)]
        silent: list[Silent] = []
        if running and not any(ending.nature.name == "OWN" for ending in self.endings):
            silent = self.look_at(running)
        failure = explain(
            self.endings, silent, world_size=self.world_size, timeout_seconds=self.timeout_seconds, now=now
        )
        self.relay.show(failure.rank, self.relay.take(failure.rank))
        return failure

    def look_at(self, running: list[_Rank]) -> list[Silent]:
        """Where the ranks are that do not answer: their state and, if they can still say it, their stack."""
        stopped = {entry.rank for entry in running if is_stopped(entry.pid)}
        asked = [entry for entry in running if entry.rank not in stopped]
        before = {entry.rank: len(self.read_stack(entry.rank)) for entry in asked}
        for entry in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.pid, DUMP_STACK)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            if all(len(self.read_stack(entry.rank)) > before[entry.rank] for entry in asked):
                break
            time.sleep(0.02)
        time.sleep(0.02)  # the last lines of a stack
        return [
            Silent(
                rank=entry.rank,
                beat=self.board.read(entry.rank),
                stopped=entry.rank in stopped,
                frames=() if entry.rank in stopped else tuple(frames_of_dump(self.read_stack(entry.rank))),
            )
            for entry in running
        ]

    def read_stack(self, rank: int) -> str:
        try:
            return self.folder.stack(rank).read_text(errors="replace")
        except OSError:
            return ""

    def close(self) -> bool:
        """End the ranks that still run and free everything; False if one could not be ended in time."""
        with contextlib.suppress(OSError, LaunchError):
            if not all(entry.ended for entry in self.ranks):
                self.link.kill_ranks()
                deadline = time.monotonic() + _END_SECONDS
                while not all(entry.ended for entry in self.ranks) and time.monotonic() < deadline:
                    self.selector.select(_TICK_SECONDS)
                    for notice in self.link.notices():
                        self.ranks[notice["ended"]].ended = True
        self.selector.close()
        for entry in self.ranks:
            entry.messages.close()
            entry.output.close()
        os.close(self.release_read)
        if self.release_write >= 0:
            os.close(self.release_write)
        self.board.close()
        return all(entry.ended for entry in self.ranks)
