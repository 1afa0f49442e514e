"""The first cause among many endings, and its words."""

from __future__ import annotations

import signal

import pytest

from hpcli.launch.diagnosis import Ending, Nature, Silent, explain, is_settled, name_ranks
from hpcli.launch.errors import RankFailure
from hpcli.launch.heartbeat import Beat
from hpcli.launch.stacks import Frame

CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"
TIMED_OUT = (
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
)
C10D = "/x/torch/distributed/distributed_c10d.py"
WAITS = (Frame("/x/torch/_wrap.py", 1, "inner"), Frame(C10D, 2, "all_reduce"), Frame("/x/mine.py", 3, "step"))


def beat(step: int = 4, phase: str = "forward", time: float = 90.0) -> Beat:
    return Beat(beats=1, step=step, phase=phase, time=time)


def raised(rank: int, at: float, kind: str = "RuntimeError", message: str = CLOSED) -> Ending:
    return Ending(rank, at, beat(), kind, message, frames=WAITS)


def died(rank: int, at: float, status: int, *output: str) -> Ending:
    return Ending(rank, at, beat(), status=status, output=output)


def explained(endings: list[Ending], silent: list[Silent] | None = None) -> RankFailure:
    return explain(endings, silent or [], world_size=4, timeout_seconds=3, now=100.0)


@pytest.mark.parametrize(
    ("ending", "nature"),
    [
        (raised(0, 0), Nature.PEER),
        (raised(0, 0, message="Socket closed"), Nature.PEER),
        (raised(0, 0, "DistBackendError", "connection reset by peer"), Nature.PEER),
        (raised(0, 0, message=TIMED_OUT), Nature.TIMEOUT),
        (raised(0, 0, "DistStoreError", "wait timeout after 3000ms"), Nature.TIMEOUT),
        (raised(0, 0, message="size mismatch"), Nature.OWN),
        # a rank's own connection, to a data server for example
        (raised(0, 0, "ConnectionResetError", "Connection reset by peer"), Nature.OWN),
        (raised(0, 0, "TimeoutError", "timed out"), Nature.OWN),
        (died(0, 0, signal.SIGKILL), Nature.OWN),
        (died(0, 0, signal.SIGABRT, "what(): Connection closed by peer"), Nature.PEER),
        (died(0, 0, signal.SIGABRT, "double free or corruption"), Nature.OWN),
        (died(0, 0, 0), Nature.OWN),
    ],
)
def test_nature(ending: Ending, nature: Nature) -> None:
    assert ending.nature is nature


def test_cause_that_arrives_after_its_consequences_is_named() -> None:
    endings = [raised(0, 10.0), raised(1, 10.01), died(3, 10.3, signal.SIGKILL)]
    assert not is_settled(endings[:2], running=2, now=10.5)
    assert not is_settled(endings, running=1, now=10.3)
    assert is_settled(endings, running=1, now=10.5)
    failure = explained(endings)
    assert (failure.rank, failure.step) == (3, 4)
    assert str(failure).startswith("rank 3 was killed by signal 9 (SIGKILL) in step 4 (forward)")


def test_first_of_two_causes_is_named() -> None:
    endings = [raised(2, 10.0, "ValueError", "bad"), raised(1, 10.1, "KeyError", "'x'")]
    assert str(explained(endings)) == "rank 2 failed in step 4 (forward): ValueError: bad"


def test_same_error_on_every_rank_is_said_once() -> None:
    endings = [raised(rank, 10.0, "ValueError", "the norm is not finite") for rank in (2, 0, 1, 3)]
    assert (
        str(explained(endings))
        == "all 4 ranks failed in step 4 (forward): ValueError: the norm is not finite"
    )
    assert str(explained(endings[:2])).startswith("ranks 0 and 2 failed")


def test_lost_connections_alone_settle_after_a_grace() -> None:
    assert not is_settled([raised(0, 10.0)], running=3, now=10.5)
    assert is_settled([raised(0, 10.0)], running=3, now=11.0)
    text = str(explained([raised(0, 10.0)], [Silent(1, beat(4, "backward"))]))
    assert "rank 0 lost its connection" in text
    assert "rank 1 was last seen in step 4 (backward), 10 s ago" in text


def test_timeouts_settle_when_no_more_arrive() -> None:
    endings = [raised(0, 10.0, message=TIMED_OUT), raised(1, 10.6)]
    assert not is_settled(endings, running=2, now=11.0)
    assert is_settled(endings, running=2, now=11.5)
    assert is_settled([*endings, *[raised(2, 12.9)]], running=1, now=13.1)


def test_hung_ranks_are_those_that_neither_timed_out_nor_wait() -> None:
    endings = [raised(0, 10.0, message=TIMED_OUT), raised(3, 10.0)]
    sleeping = Silent(1, beat(3, "data", 96.0), frames=(Frame("/home/me/data.py", 12, "read"),))
    waiting = Silent(2, beat(), frames=WAITS)
    failure = explained(endings, [sleeping, waiting])
    assert (failure.rank, failure.step) == (1, 3)
    assert str(failure).splitlines() == [
        "rank 1 hung: launch.timeout_seconds (3 s) is over",
        "  rank 1 was last seen in step 3 (data), 4 s ago, and is at /home/me/data.py:12 (read)",
        "  ranks 0, 2 and 3 wait in all-reduce, in step 4 (forward)",
    ]


def test_watchdog_names_a_stopped_rank_without_any_report() -> None:
    failure = explained([], [Silent(0, beat(0, "build"), stopped=True)])
    assert failure.step == 0
    assert "rank 0 was last seen before step 1 (build), 10 s ago, and is stopped" in str(failure)


def test_crash_shows_what_the_rank_printed_last() -> None:
    text = str(explained([died(1, 10.0, signal.SIGABRT, "malloc(): invalid size")]))
    assert text.splitlines() == [
        "rank 1 was killed by signal 6 (SIGABRT) in step 4 (forward)",
        "  [rank 1] malloc(): invalid size",
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2, 5], "ranks 0-2 and 5"),
        ([0, 2, 3, 5, 6, 7], "ranks 0, 2, 3 and 5-7"),
    ],
)
def test_name_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
