"""Why a set of ranks failed: tells the cause from its consequences and puts it into words.

One rank's end brings down the others: their connections close, or they time out waiting. A rank that ended by
itself is the cause; a lost connection is a consequence; a timeout points at the ranks that did not report one.
"""

from __future__ import annotations

import enum
import os
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hpcli.launch.errors import RankFailure
from hpcli.launch.heartbeat import Beat
from hpcli.launch.stacks import Frame, collective, place

# After a cause has shown itself, the same error of other ranks is counted for this long.
SETTLE_SECONDS = 0.15
# Consequences can arrive before their cause.
PEER_GRACE_SECONDS = 0.8
# Ranks that wait in one collective time out, or lose the connection to one that did, within this time of each other.
TIMEOUT_GRACE_SECONDS = 0.75
LONGEST_GRACE_SECONDS = 3.0

_COMMUNICATION_ERRORS = (
    "RuntimeError",
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)
_PEER_GONE = re.compile(
    r"(connection (closed|reset|refused)|socket closed|broken pipe|remote end closed|closed by (remote )?peer"
    r"|failed to recv|failed to send|connect\w* .*fail)",
    re.IGNORECASE,
)

# gloo ends the process in its own thread when it receives more than it expects
_SIZES_DIFFER = "Received data size doesn't match expected size"


class Nature(enum.Enum):
    OWN = "the rank ended by itself"
    PEER = "the rank lost its connection to a peer"
    TIMEOUT = "the rank waited for a peer in vain"


@dataclass(frozen=True)
class Ending:
    """How and where one rank ended before finishing; `at` is the parent's monotonic time."""

    rank: int
    at: float
    beat: Beat
    type: str = ""  # of the exception, empty when the process ended without one
    message: str = ""
    traceback: str = ""
    frames: tuple[Frame, ...] = ()
    status: int = 0  # wait status, where `type` is empty
    output: tuple[str, ...] = ()  # last lines that the rank printed, where `type` is empty

    @property
    def signal(self) -> int | None:
        return os.WTERMSIG(self.status) if not self.type and os.WIFSIGNALED(self.status) else None

    @property
    def nature(self) -> Nature:
        if self.type in _COMMUNICATION_ERRORS:
            text = self.message
        elif self.signal == signal.SIGABRT:
            text = "\n".join(self.output)  # gloo aborts when its own thread meets an error
        else:
            return Nature.OWN
        if _TIMEOUT.search(text):
            return Nature.TIMEOUT
        return Nature.PEER if _PEER_GONE.search(text) else Nature.OWN


@dataclass(frozen=True)
class Silent:
    """A rank that still runs while others have given up, or all that runs when nothing moves any more."""

    rank: int
    beat: Beat
    stopped: bool = False
    frames: tuple[Frame, ...] = field(default=())


def is_settled(endings: Sequence[Ending], running: int, now: float) -> bool:
    """Whether the cause can be named: it has shown itself, or nothing more is to be expected."""
    if not endings:
        return False
    own = [ending.at for ending in endings if ending.nature is Nature.OWN]
    if own:
        return running == 0 or now >= min(own) + SETTLE_SECONDS
    first, last = endings[0].at, endings[-1].at
    if now >= first + LONGEST_GRACE_SECONDS:
        return True
    if any(ending.nature is Nature.TIMEOUT for ending in endings):
        return now >= last + TIMEOUT_GRACE_SECONDS or (running == 0 and now >= last + SETTLE_SECONDS)
    return now >= first + PEER_GRACE_SECONDS


def explain(
    endings: Sequence[Ending],
    silent: Sequence[Silent],
    *,
    world_size: int,
    timeout_seconds: float,
    now: float,
) -> RankFailure:
    """The failure with its cause named first; `silent` are the ranks that had neither ended nor finished."""
    own = [ending for ending in endings if ending.nature is Nature.OWN]
    if own:
        return _explain_own(own, world_size)
    if not endings or any(ending.nature is Nature.TIMEOUT for ending in endings):
        return _explain_hang(endings, silent, timeout_seconds, now)
    first = endings[0]
    text = (
        f"rank {first.rank} lost its connection to another rank {first.beat.place}: "
        f"{first.type}: {_first_line(first.message)}. No rank has reported a cause of its own"
    )
    text += "".join(f"\n  {_seen_last(entry, now)}" for entry in silent[:16])
    return RankFailure(text, rank=first.rank, step=first.beat.step, details=first.traceback)


def _explain_own(own: Sequence[Ending], world_size: int) -> RankFailure:
    first = own[0]
    alike = [
        e.rank for e in own if (e.type, e.message, e.status) == (first.type, first.message, first.status)
    ]
    who = f"rank {first.rank}"
    if len(alike) > 1:
        who = f"all {world_size} ranks" if len(alike) == world_size else name_ranks(alike)
    details = first.traceback
    if first.type == "SystemExit":
        text = f"{who} {first.message}, {first.beat.place}"
    elif first.type:
        text = f"{who} failed {first.beat.place}: {first.type}: {first.message or '(no message)'}"
    elif first.signal is not None:
        text = f"{who} {_was_killed(first.signal, plural=len(alike) > 1)} {first.beat.place}"
        if name := collective(first.frames):
            text += f", in {name}"
        if where := place(first.frames):
            text += f", at {where}"
        if first.signal == signal.SIGKILL:
            text += (
                "\n  `kill -9` does this, and so does the system's out-of-memory killer when memory runs out "
                "(`dmesg` shows it)"
            )
        elif any(_SIZES_DIFFER in line for line in first.output):
            text += "\n  the ranks disagree about the kind or the size of this collective"
        details = "\n".join(first.output)
    else:
        code = os.waitstatus_to_exitcode(first.status)
        text = f"{who} left with exit code {code} before finishing, {first.beat.place}"
        details = "\n".join(first.output)
    if not first.type and first.output:
        text += "\n" + "\n".join(f"  [rank {first.rank}] {line}" for line in first.output[-12:])
    return RankFailure(text, rank=first.rank, step=first.beat.step, details=details)


def _explain_hang(
    endings: Sequence[Ending], silent: Sequence[Silent], timeout_seconds: float, now: float
) -> RankFailure:
    waits = [(entry.rank, entry.beat, collective(entry.frames)) for entry in endings]
    waits += [(entry.rank, entry.beat, name) for entry in silent if (name := collective(entry.frames))]
    hung = [entry for entry in silent if entry.stopped or collective(entry.frames) is None]
    groups: dict[str, list[int]] = {}
    for rank, beat, name in sorted(waits):
        if all(rank != entry.rank for entry in hung):
            groups.setdefault(f"in {name or 'a collective'}, {beat.place}", []).append(rank)
    waiting = "; ".join(
        f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {where}"
        for where, ranks in groups.items()
    )
    limit = f"launch.timeout_seconds ({timeout_seconds:g} s) is over"
    details = "\n".join(entry.traceback for entry in endings if entry.traceback)
    if hung:
        first = min(hung, key=lambda entry: (entry.beat.step, entry.beat.time, entry.rank))
        lines = [f"{name_ranks([entry.rank for entry in hung])} hung: {limit}"]
        lines += [f"  {_seen_last(entry, now)}" for entry in hung[:16]]
        if waiting:
            lines.append(f"  {waiting}")
        return RankFailure("\n".join(lines), rank=first.rank, step=first.beat.step, details=details)
    rank, beat, _ = min(waits, key=lambda entry: (entry[1].step, entry[1].time, entry[0]))
    if len(groups) > 1:
        text = f"the ranks wait for each other in different places: {limit}\n  {waiting}"
    else:
        text = f"rank {rank} and its peers waited in vain: {limit}\n  {waiting}"
    return RankFailure(text, rank=rank, step=beat.step, details=details)


def _seen_last(entry: Silent, now: float) -> str:
    text = f"rank {entry.rank} was last seen {entry.beat.place}, {max(0.0, now - entry.beat.time):.0f} s ago"
    if entry.stopped:
        return text + ", and is stopped (SIGSTOP or a debugger)"
    where = place(entry.frames)
    return text + (f", and is at {where}" if where else "")


def _was_killed(number: int, *, plural: bool) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a real-time signal"
    return f"{'were' if plural else 'was'} killed by signal {number} ({name})"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "(no message)"


def name_ranks(ranks: Collection[int]) -> str:
    """ "rank 3", "ranks 0-2 and 5"."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts: list[str] = []
    for low, high in runs:
        parts += (
            [str(low)] if low == high else [str(low), str(high)] if high == low + 1 else [f"{low}-{high}"]
        )
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
