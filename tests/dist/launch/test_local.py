"""Sets of ranks without torch: messages, output, endings, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcli.launch import LaunchError, RankFailure, RankServer

from .conftest import HERE, is_running, wait_until_ended

Events = list[dict[str, Any]]


def run(server: RankServer, program: str, payload: dict[str, Any], ranks: int, **options: Any) -> Events:
    events: Events = []
    options = {"timeout_seconds": 20.0, "on_event": events.append, **options}
    server.run(f"launch_programs:{program}", payload, ranks, **options)
    return events


def test_events_of_every_rank_arrive_completely_and_in_order(server: RankServer) -> None:
    events = run(server, "say", {"count": 300, "size": 10}, 3)
    for rank in range(3):
        assert [event["number"] for event in events if event["rank"] == rank] == list(range(300))


def test_events_larger_than_a_pipe_do_not_block(server: RankServer) -> None:
    events = run(server, "say", {"count": 3, "size": 1_000_000}, 2)
    assert sorted((e["rank"], e["number"], len(e["text"])) for e in events) == [
        (rank, number, 1_000_000) for rank in range(2) for number in range(3)
    ]


def test_slow_consumer_gets_everything(server: RankServer) -> None:
    events: Events = []

    def slow(event: dict[str, Any]) -> None:
        time.sleep(0.01)
        events.append(event)

    run(server, "say", {"count": 20, "size": 20_000}, 2, on_event=slow)
    assert len(events) == 40


def test_large_payload_reaches_the_ranks(server: RankServer) -> None:
    (event,) = run(server, "echo", {"text": "y" * 3_000_000, "list": [1, 2.5, None]}, 1)
    assert event["size"] == 3_000_000
    assert event["payload"]["list"] == [1, 2.5, None]


def test_payload_that_is_not_data_is_refused_before_a_start(server: RankServer) -> None:
    with pytest.raises(LaunchError, match="payload cannot be sent.*set"):
        run(server, "echo", {"value": {1, 2}}, 2)


def test_event_that_is_not_data_names_the_rank(server: RankServer) -> None:
    with pytest.raises(RankFailure, match="rank 0 failed.*TypeError.*set is not JSON serializable"):
        run(server, "emit_unfit", {}, 1)


def test_zero_ranks_are_refused(server: RankServer) -> None:
    with pytest.raises(LaunchError, match="at least 1"):
        run(server, "echo", {}, 0)


@pytest.mark.parametrize("target", ["no_such_module:run", "launch_programs:no_such_function"])
def test_missing_target_is_named(server: RankServer, target: str) -> None:
    with pytest.raises(RankFailure, match="all 2 ranks failed before step 1.*no_such_"):
        server.run(target, {}, 2, timeout_seconds=5, on_event=print)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", r"rank 1 failed in step 3 \(data\): ValueError: a planted error"),
        ("os._exit", r"rank 1 left with exit code 0 before finishing, in step 3 \(data\)"),
        ("sys.exit", r"rank 1 left with exit code 3 before finishing, in step 3 \(data\)"),
        ("SIGKILL", r"rank 1 was killed by signal 9 \(SIGKILL\) in step 3 \(data\)(.|\n)*out-of-memory"),
        ("SIGSEGV", r"rank 1 was killed by signal 11 \(SIGSEGV\) in step 3 \(data\).*misbehave"),
    ],
)
def test_failing_rank_is_named_and_the_others_are_ended(server: RankServer, how: str, words: str) -> None:
    pids: list[int] = []
    with pytest.raises(RankFailure, match=words) as caught:
        run(
            server,
            "alone",
            {"rank": 1, "how": how, "wait": True},
            3,
            on_event=lambda event: pids.append(event["pid"]),
        )
    assert (caught.value.rank, caught.value.step) == (1, 3)
    assert ("Traceback" in caught.value.details) == (how in ("raise", "sys.exit"))
    assert pids and wait_until_ended(pids, 0.5) == []


def test_events_that_arrive_until_the_end_are_delivered(server: RankServer) -> None:
    events: Events = []
    with pytest.raises(RankFailure, match="rank 1 failed"):
        run(server, "fail_after_peers_report", {}, 2, on_event=events.append)
    assert events == [{"event": "late"}]


@pytest.mark.parametrize(("how", "words"), [("sleep", r"misbehave"), ("SIGSTOP", "is stopped")])
def test_rank_that_stays_silent_is_named(server: RankServer, how: str, words: str) -> None:
    pids: list[int] = []
    with pytest.raises(
        RankFailure,
        match=r"rank 0 hung: launch.timeout_seconds \(0.2 s\) is over\n.*step 3 \(data\), 2 s ago.*" + words,
    ):
        run(
            server,
            "alone",
            {"rank": 0, "how": how},
            1,
            timeout_seconds=0.2,
            on_event=lambda e: pids.append(e["pid"]),
        )
    assert wait_until_ended(pids, 0.5) == []


def test_error_in_on_event_ends_the_run_and_is_raised(server: RankServer) -> None:
    pids: list[int] = []

    def broken(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run(server, "alone", {"wait": True}, 2, on_event=broken)
    assert wait_until_ended(pids, 0.5) == []
    assert len(run(server, "alone", {}, 2)) == 2


def test_keyboard_interrupt_is_raised_after_the_ranks_have_ended(server: RankServer) -> None:
    pids: list[int] = []

    def interrupt(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(server, "alone", {"wait": True}, 2, on_event=interrupt)
    assert wait_until_ended(pids, 0.5) == []


def test_process_that_a_rank_left_behind_is_ended(server: RankServer) -> None:
    (event,) = run(server, "leave_a_child", {}, 1)
    assert wait_until_ended([event["pid"]], 1.0) == []


def test_request_to_stop_reaches_the_ranks(server: RankServer) -> None:
    assert run(server, "until_stopped", {}, 2, on_event=lambda _: server.request_stop()) == []


def test_equal_lines_of_ranks_are_shown_once(server: RankServer) -> None:
    lines: list[tuple[int, str]] = []
    run(server, "print_lines", {}, 3, on_output=lambda rank, line: lines.append((rank, line)))
    assert [text for _, text in lines].count("the same on all ranks") == 1
    assert {(rank, f"only on rank {rank}") for rank in range(3)} <= set(lines)


def test_two_servers_run_side_by_side(server: RankServer) -> None:
    results: dict[int, Events] = {}

    def other_job() -> None:
        with RankServer(warm_up="launch_programs:no_warm_up") as other:
            results[1] = run(other, "say", {"count": 50, "size": 100}, 2)

    thread = threading.Thread(target=other_job)
    thread.start()
    results[0] = run(server, "say", {"count": 50, "size": 100}, 3)
    thread.join(20)
    assert (len(results[0]), len(results[1])) == (150, 100)


def test_nothing_is_left_in_the_private_folder_between_runs(server: RankServer) -> None:
    run(server, "echo", {}, 1)
    assert server.folder is not None
    assert [path.name for path in server.folder.iterdir()] == ["server.log"]


def test_descriptors_do_not_accumulate(server: RankServer) -> None:
    run(server, "echo", {}, 2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(server, "echo", {}, 2)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("warm_up", "words"),
    [
        ("broken_warm_up", "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'"),
        ("deadly_warm_up", "the rank server was killed by signal 6\n  about to die"),
        ("threaded_warm_up", "left 2 threads"),
    ],
)
def test_failed_warm_up_is_one_message(programs: None, temporary: Path, warm_up: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words), RankServer(warm_up=f"launch_programs:{warm_up}") as server:
        run(server, "echo", {}, 2)


def test_server_that_is_killed_is_reported_and_replaced(programs: None, temporary: Path) -> None:
    with RankServer(warm_up="launch_programs:no_warm_up") as server:
        pids: list[int] = []

        def kill_server(event: dict[str, Any]) -> None:
            pids.append(event["pid"])
            if len(pids) == 2:
                assert server._process is not None
                server._process.kill()

        with pytest.raises(LaunchError, match="the rank server was killed by signal 9"):
            run(server, "alone", {"wait": True}, 2, on_event=kill_server)
        assert wait_until_ended(pids, 2.0) == []
        assert len(run(server, "alone", {}, 2)) == 2


PARENT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hpcli.launch import RankServer
with RankServer(warm_up="launch_programs:no_warm_up") as server:
    print(json.dumps({"server": server._process.pid, "folder": str(server.folder)}), flush=True)
    server.run(
        "launch_programs:alone", json.loads(sys.argv[2]), 3, timeout_seconds=20,
        on_event=lambda event: print(json.dumps(event), flush=True),
    )
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_and_no_folder_outlives_the_parent(tmp_path: Path, sig: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(HERE), json.dumps({"rank": 1, "how": "SIGSTOP", "wait": True})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with parent:
        assert parent.stdout is not None and parent.stderr is not None
        about = json.loads(parent.stdout.readline())
        pids = [json.loads(parent.stdout.readline())["pid"] for _ in range(3)]
        assert all(is_running(pid) for pid in pids)
        parent.send_signal(sig)
        assert wait_until_ended([*pids, about["server"]]) == []
        errors = parent.stderr.read().decode()
    assert ("KeyboardInterrupt" in errors) == (sig == signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


def test_parent_imports_no_framework() -> None:
    code = "import hpcli.launch, sys; print(sorted({'torch', 'mindspore', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
