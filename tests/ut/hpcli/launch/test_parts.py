"""The launcher's small parts: heartbeats, pipes, output and stacks."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import timeit
from pathlib import Path

import pytest

from hpcli.launch.channel import LineReader, LineWriter
from hpcli.launch.context import PHASES, RankContext
from hpcli.launch.heartbeat import Board, Pulse
from hpcli.launch.local import server_environment
from hpcli.launch.output import HOLD_SECONDS, OutputRelay
from hpcli.launch.stacks import Frame, collective, frames_of_dump, place


def context(pulse: Pulse) -> RankContext:
    return RankContext(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        host="here",
        init_method="env://",
        store_path=None,
        timeout_seconds=1,
        launcher="local",
        pulse=pulse,
        send=lambda event: None,
    )


def test_board_keeps_every_ranks_last_beat(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 3)
    other_process = Board(tmp_path / "board")
    for rank in range(3):
        Pulse.on_board(other_process, rank).beat(rank + 1, PHASES[rank])
    assert [board.read(rank)[:3] for rank in range(3)] == [(1, 1, "start"), (1, 2, "build"), (1, 3, "data")]
    assert not other_process.stop_requested
    board.request_stop()
    assert other_process.stop_requested


def test_progress_is_cheap_and_refuses_unknown_phases() -> None:
    rank = context(Pulse.private())
    seconds = min(timeit.repeat(lambda: rank.progress(7, "gradient norm"), number=1000, repeat=20)) / 1000
    assert seconds < 5e-6
    assert rank.last_beat[:3] == (20_000, 7, "gradient norm")
    with pytest.raises(ValueError, match="unknown phase 'norm'; the phases are start, build"):
        rank.progress(7, "norm")


def test_lines_are_whole_whatever_the_pipe_does() -> None:
    read, write = os.pipe()
    reader, writer = LineReader(read), LineWriter(write)
    assert reader.read() == []
    writer.send({"a": 1})
    os.write(write, b'{"b"')
    assert reader.read() == [b'{"a": 1}']
    os.write(write, b": 2}\nrest")
    assert reader.read() == [b'{"b": 2}']
    os.close(write)
    assert reader.read() == [b"rest"]
    assert reader.ended
    reader.close()


def test_relay_shows_a_line_of_many_ranks_once() -> None:
    shown: list[tuple[int, str]] = []
    relay = OutputRelay(lambda rank, line: shown.append((rank, line)))
    relay.feed(0, [b"hello", b"hello"], 0.0)
    relay.feed(1, [b"hello", b"hello", b"hello", b"news"], 0.0)
    relay.feed(1, [b"[W1201 00:01:02.5 77 file.cpp:1] careful"], 0.0)
    relay.feed(2, [b"[W1201 00:01:03.7 78 file.cpp:1] careful", b"10%\r100%"], 0.0)
    relay.flush(HOLD_SECONDS / 2)
    assert shown == []
    relay.flush(HOLD_SECONDS)
    assert shown == [
        (0, "hello"),
        (0, "hello"),
        (1, "hello"),
        (1, "news"),
        (1, "[W1201 00:01:02.5 77 file.cpp:1] careful"),
        (2, "100%"),
    ]


def test_relay_gives_back_what_was_not_shown() -> None:
    shown: list[str] = []
    relay = OutputRelay(lambda rank, line: shown.append(line))
    relay.feed(0, [b"noise"], 0.0)
    relay.feed(1, [b"reason"], 0.0)
    assert relay.take(1) == ["reason"]
    relay.flush(float("inf"))
    assert shown == ["noise"]


@pytest.mark.parametrize(
    ("file", "function", "name"),
    [
        ("distributed_c10d.py", "all_gather_into_tensor", "all-gather"),
        ("distributed_c10d.py", "reduce_scatter_tensor", "reduce-scatter"),
        ("distributed_c10d.py", "all_reduce", "all-reduce"),
        ("distributed_c10d.py", "monitored_barrier", "barrier"),
        ("fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard", "all-gather"),
        ("pipelining/schedules.py", "_wait_batch_p2p", "send/receive of a pipeline stage"),
        ("distributed_c10d.py", "init_process_group", "the start of the process group"),
        ("fsdp/_fully_shard/_fsdp_state.py", "_pre_forward", None),
    ],
)
def test_collective_of_a_stack(file: str, function: str, name: str | None) -> None:
    stack = [Frame("/a/threading.py", 1, "wait"), Frame(f"/a/torch/distributed/{file}", 2, function)]
    assert collective(stack) == name
    assert collective([Frame("/home/me/mine.py", 3, function)]) is None


def test_stack_written_by_faulthandler_is_read() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        frames = frames_of_dump(file.read())
    assert frames[0].function == "test_stack_written_by_faulthandler_is_read"
    assert place(frames) == f"{__file__}:{frames[0].line} (test_stack_written_by_faulthandler_is_read)"


def test_server_has_one_thread_and_meets_on_the_loopback() -> None:
    environment = server_environment({"OMP_NUM_THREADS": "16", "HOME": "/root"}, "cpu")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HOME"] == "/root"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert server_environment({"GLOO_SOCKET_IFNAME": "eth7"}, "cpu")["GLOO_SOCKET_IFNAME"] == "eth7"


def test_accelerators_are_hidden_from_a_server_for_the_cpu_only() -> None:
    assert server_environment({"CUDA_VISIBLE_DEVICES": "3"}, "cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert server_environment({"CUDA_VISIBLE_DEVICES": "3"}, "cuda")["CUDA_VISIBLE_DEVICES"] == "3"
