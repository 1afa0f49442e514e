"""Real ranks on the simulated NPU: a rank server of their own, since a process either has the device or has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcli.launch import RankFailure, RankServer

PROGRAMS = Path(__file__).parents[2] / "rank_programs"


@pytest.fixture(scope="session")
def npu_server() -> Iterator[RankServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))
        with RankServer("sim-npu") as server:
            yield server


@pytest.fixture(scope="session")
def on_npu_ranks(npu_server: RankServer) -> Callable[..., list[Any]]:
    """As ``on_ranks``, on the simulated NPU; ``strict_dtypes=True`` is its strict mode."""

    def run(program: str, world_size: int, **arguments: Any) -> list[Any]:
        results: dict[int, Any] = {}
        try:
            npu_server.run(
                "npu_programs:call",
                {"program": program, "arguments": arguments},
                world_size,
                timeout_seconds=30.0,
                on_event=lambda event: results.update({event["rank"]: event["result"]}),
            )
        except RankFailure as failure:
            pytest.fail(f"{failure}\n{failure.details}", pytrace=False)
        return [results[rank] for rank in range(world_size)]

    return run
