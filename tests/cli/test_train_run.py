"""``hpcli train`` as it is typed: real ranks, real output."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
HPCLI = (sys.executable, "-m", "hpcli")


def start(arguments: Sequence[object], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, arguments)),
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(config: str, output: Path, *options: str, **environment: str) -> tuple[int, str, str]:
    with start((*HPCLI, "train", CONFIGS / config, "--output", output, *options), **environment) as process:
        stdout, stderr = process.communicate(timeout=180)
    return process.returncode, stdout, stderr


def events(stdout: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, stdout.splitlines()) if event["event"] == kind]


def losses_and_norms(stdout: str) -> list[tuple[str, str]]:
    return [(float(e["loss"]).hex(), float(e["grad_norm"]).hex()) for e in events(stdout, "step")]


def test_run_on_a_pipe_shows_steps_table_and_verdict_and_keeps_metrics(tmp_path: Path) -> None:
    code, stdout, stderr = train("fsdp4.yaml", tmp_path, "--steps", "3")
    assert (code, stderr) == (0, "")
    assert "\x1b" not in stdout and "\r" not in stdout
    norm = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[3])["grad_norm"]
    assert f"4 of 4 ranks hold {norm:.6g}, bit for bit" in stdout
    first, last = (e["loss"] for e in events((tmp_path / "metrics.jsonl").read_text(), "step")[::2])
    assert 5.4 < first < 5.7 and last < first  # ln 256 = 5.545
    assert (tmp_path / "loss_and_norm.png").read_bytes()[:4] == b"\x89PNG"


def test_offload_changes_no_bit_of_losses_and_norms_and_the_reduce_dtype_does(tmp_path: Path) -> None:
    runs = {}
    for option in ("--no-enable-offload", "--enable-offload", "--no-accumulate-allreduce-grads-in-fp32"):
        code, stdout, stderr = train("hsdp2x4.yaml", tmp_path / option, "--steps", "3", "--json", option)
        assert (code, stderr) == (0, "")
        runs[option] = losses_and_norms(stdout)
        (table,) = events(stdout, "norm_table")
        assert len(table["rows"]) == 8
        assert len({row["global_norm"] for row in table["rows"]}) == 1
        local = [row["local_norm"] for row in table["rows"]]
        assert local[:4] == local[4:] and len(set(local)) == 4  # each on both replicas
        assert [row["contributed"] for row in table["rows"]] == [*local[:4], 0, 0, 0, 0]
    assert len(runs["--enable-offload"]) == 3
    assert runs["--enable-offload"] == runs["--no-enable-offload"]
    assert runs["--no-accumulate-allreduce-grads-in-fp32"] != runs["--no-enable-offload"]


def test_torchrun_on_one_node_and_on_two_gives_the_bits_of_local_ranks(tmp_path: Path) -> None:
    _, stdout, _ = train("fsdp4.yaml", tmp_path / "local", "--steps", "2", "--json")
    expected = losses_and_norms(stdout)
    assert len(expected) == 2
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    command = ("-m", "hpcli", "train", CONFIGS / "fsdp4.yaml", "--steps", "2", "--json", "--output")
    port = port_that_nobody_is_given()
    pair = ("--nnodes", 2, "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", port)
    nodes = [start((*torchrun, *pair, "--node-rank", i, *command, tmp_path / "two")) for i in (0, 1)]
    for_one = start((*torchrun, "--standalone", "--nproc-per-node", 4, *command, tmp_path / "one"))
    ended = [(process.communicate(timeout=240), process.returncode) for process in (*nodes, for_one)]
    assert [code for _, code in ended] == [0, 0, 0], [errors[-3000:] for (_, errors), code in ended if code]
    outputs = [output for (output, _), _ in ended]
    assert losses_and_norms(outputs[0]) == expected
    assert outputs[1] == ""  # only rank 0 reports
    assert losses_and_norms(outputs[2]) == expected


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raise", "rank 2 failed in step 3 (data): RuntimeError: planted failure"),
        ("exit", "rank 2 left with exit code 0 before finishing, in step 3"),
        ("kill", "rank 2 was killed by signal 9 (SIGKILL) in step 3"),
        ("sleep", "rank 2 hung"),
    ],
)
def test_failing_rank_is_named_and_nothing_survives(tmp_path: Path, kind: str, words: str) -> None:
    code, stdout, stderr = train(
        "fsdp4.yaml",
        tmp_path,
        "--set",
        "launch.timeout_seconds=10",
        HPCLI_PLANT=f"{kind}:rank=2,step=3",
        HPCLI_TEST_MARK=str(tmp_path),
    )
    assert code == 1
    assert stderr.startswith(f"error: {words}") and "Traceback" not in stderr
    assert "step 2/" in stdout or "step 1/" in stdout  # what was reached stays reported
    deadline = time.monotonic() + 5
    while processes_marked(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_marked(tmp_path) == []


def port_that_nobody_is_given() -> int:
    """A free port below those that the system hands out, which another process could get before torchrun listens on it."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def processes_marked(mark: Path) -> list[int]:
    """Processes that inherited the mark in their environment, as all of a run do."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HPCLI_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_the_run_with_what_there_is_recorded(
    tmp_path: Path, number: signal.Signals, code: int, words: str
) -> None:
    command = (*HPCLI, "train", CONFIGS / "fsdp4.yaml", "--output", tmp_path, "--steps", "100000")
    with start(command, HPCLI_TEST_MARK=str(tmp_path)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (code, f"{words}\n")
    kinds = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds[0] == "start" and "step" in kinds and kinds[-1] == "stopped"
    assert (tmp_path / "loss_and_norm.png").exists()
    assert processes_marked(tmp_path) == []
