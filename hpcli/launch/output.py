"""What ranks print: passed on line by line with the rank's number, without the noise of many ranks."""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

# Lines wait this long before they are shown, so that what peers print while they go down with a failed rank can
# be held back when the failure is known.
HOLD_SECONDS = 0.1
_REMEMBERED_LINES = 2000
# "[W1130 23:57:01.123456 12345 file.cpp:1]": the same warning from two ranks differs in time and process only
_LOG_PREFIX = re.compile(r"^\[?[IWEF]\d{4} [\d:.]+(\s+\d+)? ")


def print_line(rank: int, line: str) -> None:
    """The default: standard error, because standard output belongs to the report."""
    print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)


class OutputRelay:
    """Shows what ranks print; a line that several ranks print is shown once, for the rank that is first.

    The nth time that a rank prints a line counts as the same as the nth time of any other rank.
    """

    def __init__(self, show: Callable[[int, str], None]) -> None:
        self._show = show
        self._pending: deque[tuple[float, int, str]] = deque()
        # line -> how often each rank has printed it; only the most recent lines are remembered
        self._counts: OrderedDict[str, Counter[int]] = OrderedDict()

    def feed(self, rank: int, lines: Iterable[bytes], now: float) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            # of a progress bar that redraws itself only the last state is of interest
            self._pending.append((now, rank, text.rsplit("\r", 1)[-1]))

    def flush(self, now: float) -> None:
        """Show what has waited long enough."""
        while self._pending and self._pending[0][0] <= now - HOLD_SECONDS:
            _, rank, text = self._pending.popleft()
            key = _LOG_PREFIX.sub("", text)
            counts = self._counts.setdefault(key, Counter())
            self._counts.move_to_end(key)
            shown = max(counts.values(), default=0)
            counts[rank] += 1
            if counts[rank] > shown:
                self._show(rank, text)
            if len(self._counts) > _REMEMBERED_LINES:
                self._counts.popitem(last=False)

    def take(self, rank: int) -> list[str]:
        """Remove and return the lines of a rank that have not been shown yet."""
        taken = [text for _, owner, text in self._pending if owner == rank]
        self._pending = deque(entry for entry in self._pending if entry[1] != rank)
        return taken

    def show(self, rank: int, lines: Iterable[str]) -> None:
        for line in lines:
            self._show(rank, line)
