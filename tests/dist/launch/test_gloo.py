"""Ranks in real collectives: which one is named when the others are waiting for it."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from hpcli.launch import RankFailure, RankServer

Events = list[dict[str, Any]]


def run(server: RankServer, program: str, payload: dict[str, Any], ranks: int, timeout: float = 20) -> Events:
    events: Events = []
    server.run(f"launch_programs:{program}", payload, ranks, timeout_seconds=timeout, on_event=events.append)
    return events


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_reduce_on_one_server_with_any_number_of_ranks(torch_server: RankServer, ranks: int) -> None:
    pairs = ranks * (ranks - 1) // 2
    assert run(torch_server, "add_up", {"steps": 3}, ranks) == [
        {"event": "step", "step": step, "sum": float(pairs * step)} for step in (1, 2, 3)
    ]


def test_two_jobs_at_once_do_not_meet(torch_server: RankServer, programs: None) -> None:
    sums: dict[int, Events] = {}

    def other_job() -> None:
        with RankServer() as other:
            sums[3] = run(other, "add_up", {"steps": 20}, 3)

    thread = threading.Thread(target=other_job)
    thread.start()
    while thread.is_alive():
        sums[2] = run(torch_server, "add_up", {"steps": 20}, 2)
    assert [event["sum"] for event in sums[2]] == [float(step) for step in range(1, 21)]
    assert [event["sum"] for event in sums[3]] == [3.0 * step for step in range(1, 21)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 2 failed in step 2 .backward.: ValueError: a planted error"),
        ("os._exit", "rank 2 left with exit code 0 before finishing, in step 2 .backward."),
        ("SIGKILL", "rank 2 was killed by signal 9 .SIGKILL. in step 2 .backward."),
    ],
)
def test_cause_is_named_and_not_the_peers_lost_connections(
    torch_server: RankServer, how: str, words: str
) -> None:
    with pytest.raises(RankFailure, match=words) as caught:
        run(torch_server, "fail_in_step_2", {"rank": 2, "how": how}, 4)
    assert (caught.value.rank, caught.value.step) == (2, 2)


@pytest.mark.parametrize(("how", "words"), [("sleep", "is at .*misbehave"), ("SIGSTOP", "is stopped")])
def test_hung_rank_is_named_with_the_collective_of_the_others(
    torch_server: RankServer, how: str, words: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(torch_server, "fail_in_step_2", {"rank": 1, "how": how}, 4, timeout=3)
    assert time.monotonic() - start < 3 + 10
    first, seen, waiting = str(caught.value).splitlines()
    assert first == "rank 1 hung: launch.timeout_seconds (3 s) is over"
    assert "rank 1 was last seen in step 2 (backward)" in seen
    assert re.search(words, seen)
    assert "ranks 0, 2 and 3 wait in all-reduce, in step 3 (forward)" in waiting
    assert (caught.value.rank, caught.value.step) == (1, 2)


def test_ranks_in_different_collectives_are_told_apart(torch_server: RankServer) -> None:
    with pytest.raises(RankFailure, match="ranks 0 and 2 wait in all-gather.*rank 1 waits in barrier"):
        run(torch_server, "wait_for_nothing", {}, 3, timeout=3)


def test_ranks_that_disagree_about_a_size_are_told_so(torch_server: RankServer) -> None:
    with pytest.raises(RankFailure, match="in all-reduce(.|\n)*disagree about the kind or the size"):
        run(torch_server, "all_reduce_of_unequal_sizes", {}, 2)


def test_rank_that_leaves_its_group_early_is_shown(torch_server: RankServer) -> None:
    with pytest.raises(
        RankFailure, match="lost its connection(.|\n)*rank 1 was last seen in step 1 .finish."
    ):
        run(torch_server, "leave_the_group", {}, 3)
