"""Linux facts about processes: ending with the parent, thread counts, states, memory."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, sig: signal.Signals) -> bool:
    """Ask the kernel for `sig` when the parent's thread ends; False if `parent` had already ended before that."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def set_process_name(name: str) -> None:
    """Name this process in `ps` and `top` (15 characters)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def is_stopped(pid: int) -> bool:
    """Whether the process is held by SIGSTOP or a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def proportional_memory(pid: int) -> int:
    """Bytes of memory of a process, a page shared by n processes counted as 1/n (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no Pss line")
