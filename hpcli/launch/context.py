"""What a rank program is given: who it is, how to meet the others, and how to report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcli.launch.heartbeat import PHASE_INDEX, PHASES, Beat, Pulse

__all__ = ["PHASES", "RankContext"]


class RankContext:
    """The launcher's side of one rank, the first argument of every rank program.

    The program itself starts its process group, with `init_method`, `rank`, `world_size` and
    `timeout_seconds` (a hung peer is then found when that time is over).

    Attributes:
        rank, world_size: position among all ranks.
        local_rank, local_world_size: position among the ranks of this host.
        host: this machine's name.
        init_method: rendezvous URL for `torch.distributed.init_process_group`.
        store_path: file of the rendezvous store where ranks are local, else None.
        timeout_seconds: time after which a silent rank counts as hung.
        launcher: "local", "torchrun", "srun" or "msrun".
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
        host: str,
        init_method: str,
        store_path: str | None,
        timeout_seconds: float,
        launcher: str,
        pulse: Pulse,
        send: Callable[[dict[str, Any]], None],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.host = host
        self.init_method = init_method
        self.store_path = store_path
        self.timeout_seconds = timeout_seconds
        self.launcher = launcher
        self._pulse = pulse
        self._send = send
        self._stop_requested = stop_requested

    def progress(self, step: int, phase: str) -> None:
        """Note that this rank is alive, in `step` (1-based; 0 before the first) and `phase` (one of PHASES)."""
        if phase not in PHASE_INDEX:
            raise ValueError(f"unknown phase {phase!r}; the phases are {', '.join(PHASES)}")
        self._pulse.beat(step, phase)

    def emit(self, event: dict[str, Any]) -> None:
        """Send a JSON-able event to `on_event` of the process that reports; events of a rank keep their order.

        Under torchrun, srun and msrun only rank 0 reports: events of other ranks are dropped there.
        """
        self._send(event)

    @property
    def last_beat(self) -> Beat:
        return self._pulse.read()

    @property
    def stop_requested(self) -> bool:
        """Whether the run has been asked to end early (a scheduler's SIGTERM).

        Ranks may see this at different steps, so the program must agree on it by a collective.
        """
        return self._stop_requested()
