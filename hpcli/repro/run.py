"""The parent's part of repro: rank servers, one for each kind of device, and one entry after the other on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpcli.doctor import accelerator_count
from hpcli.faults.entry import Entry
from hpcli.launch import RankFailure, RankServer
from hpcli.report.failures import REMEDIES
from hpcli.repro.verdict import Outcome, Verdict, judge

if TYPE_CHECKING:
    from typing_extensions import Self

RANK_PROGRAM = "hpcli.repro.rank_program:run"
WARM_UP = {("torch", "cpu"): "hpcli.check.warm:warm", ("mindspore", "cpu"): "hpcli.repro.warm:import_mindspore"}
TIMEOUT_SECONDS = 30.0


class Stage:
    """Where faults are re-enacted: a context manager around the rank servers, each started when it is first needed."""

    def __init__(self, on_output: Callable[[int, str], None] = lambda rank, line: None, prepare: str | None = None) -> None:
        """Args:
        on_output: called with what ranks print, warnings of the frameworks among it.
        prepare: "package.module:function" that every rank calls first; a test breaks the library with it.
        """
        self._servers: dict[tuple[str, str], RankServer] = {}
        self._stack = ExitStack()
        self._on_output = on_output
        self.prepare = prepare

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._servers.clear()

    def reproduce(self, entry: Entry, file: str, ranks: int, *, planted: bool) -> Verdict:
        """Re-enact ``entry``, which ``file`` defines, on ``ranks``. ``planted`` says that its faulty side is a reverted rule.

        Raises:
            LaunchError: ranks cannot be started at all.
        """
        device = device_for(entry, ranks)
        self._server(entry.platform, device).wait_until_ready()
        began = time.perf_counter()
        if planted or entry.alone:  # what is patched or hung stays so for good
            right, _ = self._run(entry, file, device, ranks, ["right"], TIMEOUT_SECONDS)
            _, wrong = self._run(entry, file, device, ranks, ["wrong"], entry.timeout_seconds)
        else:
            right, wrong = self._run(entry, file, device, ranks, ["right", "wrong"], TIMEOUT_SECONDS)
        return judge(entry, ranks, device, wrong, right, time.perf_counter() - began)

    def _run(
        self, entry: Entry, file: str, device: str, ranks: int, sides: Sequence[str], timeout_seconds: float
    ) -> tuple[list[Outcome], list[Outcome]]:
        told: dict[tuple[str, int], Outcome] = {}
        payload = {
            "module": file,
            "platform": entry.platform,
            "device": device,
            "sides": list(sides),
            "strict_dtypes": entry.strict_dtypes,
            "prepare": self.prepare,
        }
        lost = "no answer"
        try:
            self._server(entry.platform, device).run(
                RANK_PROGRAM,
                payload,
                ranks,
                timeout_seconds=timeout_seconds,
                on_event=lambda event: told.update({(event["side"], event["rank"]): event}),
                on_output=self._on_output,
            )
        except RankFailure as failure:
            lost = str(failure)
        right, wrong = (
            [told.get((side, rank), {"lost": lost}) for rank in range(ranks)] for side in ("right", "wrong")
        )
        return right, wrong

    def _server(self, platform: str, device: str) -> RankServer:
        kind = (platform, device)
        if kind not in self._servers:
            self._servers[kind] = self._stack.enter_context(RankServer(device, warm_up=WARM_UP.get(kind)))
        return self._servers[kind]


def missing(entry: Entry) -> str:
    """What has to be installed before ``entry`` can run; empty where nothing has to."""
    if entry.platform == "mindspore" and find_spec("mindspore") is None:
        return f"MindSpore is not installed; {REMEDIES['mindspore']}"
    return ""


def device_for(entry: Entry, ranks: int) -> str:
    """The device that an entry runs on: where it wants an accelerator, the real one if there are enough of it."""
    if entry.device != "accelerator":
        return entry.device
    return next((kind for kind in ("npu", "cuda") if (accelerator_count(kind) or 0) >= ranks), "sim-npu")
