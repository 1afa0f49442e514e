"""Real ranks for tests: one warmed-up rank server for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcli.launch import RankFailure, RankServer

PROGRAMS = Path(__file__).parent / "rank_programs"
TIMEOUT_SECONDS = 30.0

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))  # the server copies sys.path, so the ranks find the programs too
        with RankServer() as server:
            yield server


@pytest.fixture(scope="session")
def on_ranks(rank_server: RankServer) -> OnRanks:
    """``on_ranks("module:function", world_size, **arguments)``: what the function returns on each rank, in rank order."""

    def run(program: str, world_size: int, **arguments: Any) -> list[Any]:
        results: dict[int, Any] = {}
        try:
            rank_server.run(
                "harness:call",
                {"program": program, "arguments": arguments},
                world_size,
                timeout_seconds=TIMEOUT_SECONDS,
                on_event=lambda event: results.update({event["rank"]: event["result"]}),
            )
        except RankFailure as failure:
            pytest.fail(f"{failure}\n{failure.details}", pytrace=False)
        return [results[rank] for rank in range(world_size)]

    return run
