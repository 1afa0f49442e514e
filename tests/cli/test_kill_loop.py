"""Killed again and again, at random moments and while a checkpoint is written, a run still becomes the run that it would have been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = """
model: {preset: decoder-tiny, num_layers: 1}
training: {steps: %d, global_batch_size: 4, seq_length: 16}
checkpoint: {every: 1, keep: 2}
launch: {ranks: 2}
logging: {plot: false}
device: cpu
"""
SECONDS = 60.0


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hpcli", "train", "killed.yaml", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run ended before it was killed: {process.communicate()[1].decode()}")
        time.sleep(0.0005)


def steps(folder: Path) -> list[tuple[int, float, float]]:
    records: list[Any] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "step":
            records.append((record["step"], record["loss"], record["grad_norm"]))
    return records


@pytest.mark.parametrize(("kills", "total"), [(2, 60), pytest.param(20, 1500, marks=pytest.mark.long)])
def test_a_run_that_is_killed_again_and_again_always_resumes(tmp_path: Path, kills: int, total: int) -> None:
    (tmp_path / "killed.yaml").write_text(TEXT % total)
    saves = tmp_path / "run/checkpoints"
    rng = random.Random(0)
    while_saving = 0
    for number in range(kills):
        newest = max(saves.glob("step-*"), default=None) if saves.exists() else None
        process = start(tmp_path, *(("--resume", "run") if newest else ()), "--output", "run")
        until(lambda newest=newest: saves.exists() and max(saves.glob("step-*"), default=newest) != newest, process)  # type: ignore[misc]
        if number % 2 == 0:
            until(lambda: any(saves.glob(".writing-*")), process)
            while_saving += 1
        else:
            time.sleep(rng.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert while_saving >= kills // 2
    last = start(tmp_path, "--resume", "run", "--output", "run")
    assert last.communicate(timeout=300)[1] == b"" and last.returncode == 0
    whole = start(tmp_path, "--output", "whole", "--set", "checkpoint.every=0")
    assert whole.communicate(timeout=300)[1] == b"" and whole.returncode == 0
    assert steps(tmp_path / "run") == steps(tmp_path / "whole") and len(steps(tmp_path / "whole")) == total
    assert not [path.name for path in saves.iterdir() if path.name.startswith(".")]
