"""Planted failures: see for yourself how a run ends when a rank goes wrong.

``HPCLI_PLANT=KIND:rank=R,step=S`` makes rank R fail at the beginning of step S. Kinds: ``raise`` (an exception), ``exit``
(``os._exit(0)``), ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``sleep`` (never comes back) and ``overflow`` (a gradient of that rank is
infinite in that step). It is read by the ranks alone.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "HPCLI_PLANT"
KINDS = ("raise", "exit", "kill", "stop", "sleep", "overflow")


@dataclass(frozen=True)
class Planted:
    """One failure: ``kind`` on ``rank`` at ``step``."""

    kind: str
    rank: int
    step: int

    def strike(self, rank: int, step: int) -> bool:
        """Fail if this is the rank and the step; True where the failure is an overflow, which is the engine's to make."""
        if (rank, step) != (self.rank, self.step):
            return False
        if self.kind == "overflow":
            return True
        if self.kind == "raise":
            raise RuntimeError(f"planted failure ({VARIABLE})")
        if self.kind == "exit":
            os._exit(0)
        if self.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        time.sleep(86_400)
        return False


def planted_failure(environment: Mapping[str, str] = os.environ) -> Planted | None:
    """The failure that the environment asks for, if any.

    Raises:
        ValueError: the variable is set and not understood.
    """
    text = environment.get(VARIABLE)
    if not text:
        return None
    match = re.fullmatch(rf"({'|'.join(KINDS)}):rank=(\d+),step=(\d+)", text)
    if not match:
        raise ValueError(f"{VARIABLE}={text!r} is not KIND:rank=R,step=S with KIND one of {', '.join(KINDS)}")
    return Planted(match[1], int(match[2]), int(match[3]))
