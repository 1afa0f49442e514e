"""Checkpoints as a user meets them: resuming, being ended by a scheduler or by hand, and everything that can be wrong with one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = """
model: {preset: decoder-tiny, num_layers: 1}
training: {steps: 6, global_batch_size: 4, seq_length: 16}
checkpoint: {every: 2, keep: 2}
launch: {ranks: 2}
device: cpu
"""
TIMES = ("seconds", "tokens_per_second")


@pytest.fixture
def two(tmp_path: Path) -> str:
    (tmp_path / "two.yaml").write_text(TEXT)
    return "two.yaml"


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["event"] == "step"]


def test_a_killed_run_resumes_in_its_folder_and_the_records_are_those_of_one_run(hpcli: Any, two: str, tmp_path: Path) -> None:
    assert hpcli("train", two, "--output", "whole").returncode == 0
    killed = hpcli("train", two, "--output", "killed", env={"HPCLI_PLANT": "kill:rank=1,step=6"})
    assert killed.returncode == 1 and "rank 1 was killed by signal 9" in killed.stderr
    assert len(steps(tmp_path / "killed")) == 5  # one more than the checkpoint has seen
    resumed = hpcli("train", two, "--resume", "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes killed/checkpoints/step-00000004, after step 4" in resumed.stdout
    assert steps(tmp_path / "killed") == steps(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "killed/checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    exported = hpcli("export", "killed", "weights.safetensors")
    assert exported.returncode == 0 and "weights.safetensors: 12 tensors" in exported.stdout


def test_another_number_of_ranks_resumes_and_says_so(hpcli: Any, two: str) -> None:
    assert hpcli("train", two, "--output", "a", "--steps", "2").returncode == 0
    resumed = hpcli("train", two, "--resume", "a", "--output", "b", "--ranks", "4", "--set", "optimizer.lr=0.01")
    assert resumed.returncode == 0, resumed.stderr
    assert "layout changed: written by 2 ranks (dp_shard 2), read by 4 (dp_shard 4)" in resumed.stdout
    assert "changed since the checkpoint: optimizer.lr 0.001 -> 0.01" in resumed.stdout


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "SLURM"))}
    return subprocess.Popen(
        [sys.executable, "-m", "hpcli", "train", "two.yaml", "--set", "training.steps=100000", "--output", "run", *arguments],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)


def test_sigterm_writes_a_last_checkpoint_and_the_exit_code_says_so(hpcli: Any, two: str, tmp_path: Path) -> None:
    process = start(tmp_path, "--set", "checkpoint.every=100000")
    wait_for(tmp_path / "run/metrics.jsonl", process)
    while not steps(tmp_path / "run"):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and err == "ended by SIGTERM\n"
    last = steps(tmp_path / "run")[-1]["step"]
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    assert checkpoint.name == f"step-{last:08d}" and f"stopped after step {last} of 100000" in out
    assert hpcli("train", two, "--steps", str(last + 1), "--resume", "run").returncode == 0
    assert steps(tmp_path / "run")[-1]["step"] == last + 1


def test_ctrl_c_leaves_the_last_checkpoint(two: str, tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for(tmp_path / "run/checkpoints/step-00000002", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == "interrupted\n"
    names = [path.name for path in (tmp_path / "run/checkpoints").iterdir() if not path.name.startswith(".")]
    assert names and all((tmp_path / "run/checkpoints" / name / "state.json").exists() for name in names)


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        ("", ("--resume", "nowhere"), "there is no nowhere"),
        ("", ("--resume", "empty"), "empty holds no complete checkpoint"),
        ("", ("--resume", "two.yaml"), "two.yaml is a file"),
        ("", ("--resume", "run", "--steps", "2"), "is at step 2, and training.steps is 2: nothing is left to do"),
        ("", ("--resume", "run", "--set", "model.num_layers=2"), "is of another model: it has no parameter layers.1."),
        ("", ("--resume", "run", "--set", "model.ffn_size=64"), "is of another model: its layers.0.ffn.gate.weight is (192, 64)"),
        ("", ("--resume", "run", "--set", "optimizer.name=sgd"), "holds the state of adamw, and optimizer.name is sgd"),
        ("truncate", ("--resume", "run"), "bytes, and"),
        ("remove", ("--resume", "run"), "is missing"),
        ("state", ("--resume", "run"), "is damaged or no checkpoint's state"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_one_message_and_nothing_is_lost(
    hpcli: Any, two: str, tmp_path: Path, run_of_two_steps: Path, spoil: str, arguments: tuple[str, ...], message: str
) -> None:
    shutil.copytree(run_of_two_steps, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    shard = next(checkpoint.glob("*.safetensors"))
    if spoil == "truncate":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif spoil == "remove":
        shard.unlink()
    elif spoil == "state":
        (checkpoint / "state.json").write_text('{"format": 1')
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    done = hpcli("train", two, *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "two.yaml").write_text(TEXT)
    command = [sys.executable, "-m", "hpcli", "train", "two.yaml", "--steps", "2", "--output", "run"]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return folder / "run"


def test_a_full_disk_ends_the_run_with_its_folder_named_and_the_last_checkpoint_stands(hpcli: Any, two: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        done = hpcli("train", two, "--steps", "40", "--set", "checkpoint.keep=100", "--set", f"checkpoint.directory={small}/c")
        assert done.returncode == 1
        assert "cannot write a checkpoint into" in done.stderr and "No space left on device" in done.stderr
        left = list((small / "c").iterdir())
        assert left and all(path.name.startswith("step-") and (path / "state.json").exists() for path in left)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cannot_be_written_is_named(hpcli: Any, two: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = hpcli("train", two, "--set", "checkpoint.directory=file/c")
    assert done.returncode == 1 and "cannot write a checkpoint into" in done.stderr and "file/c" in done.stderr
    assert "Traceback" not in done.stderr
