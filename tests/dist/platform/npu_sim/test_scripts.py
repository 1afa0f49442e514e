"""Whole processes with the simulated NPU: scripts of one's own, under torchrun, and the command line."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFIGS = HERE.parents[3] / "examples" / "configs"


def run(*command: str) -> str:
    """What the command prints; it must end with exit code 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_scripts_that_end_right_after_backward_end_well(count: int) -> None:
    assert ast.literal_eval(run(str(HERE / "short_runs.py"), str(count), "4")) == [0] * count


@pytest.mark.long
def test_a_script_of_ones_own_under_torchrun() -> None:
    out = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "own_script.py"))
    norms = dict(re.findall(r"rank (\d) done (\[.*?\])", out))
    assert sorted(norms) == ["0", "1"] and norms["0"] == norms["1"]


def test_hpcli_trains_on_it_with_offload_in_strict_mode(tmp_path: Path) -> None:
    options = ("--device", "sim-npu", "--steps", "2", "--enable-offload", "--set", "device_options.strict_dtypes=true")
    out = run("-m", "hpcli", "train", str(CONFIGS / "fsdp4.yaml"), *options, "--json", "--output", str(tmp_path / "run"))
    events = [json.loads(line) for line in out.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    (table,) = [event for event in events if event["event"] == "norm_table"]
    assert len(steps) == 2 and steps[1]["loss"] < steps[0]["loss"]
    assert [row["device"] for row in table["rows"]] == ["npu:0"] * 4
    assert {row["global_norm"] for row in table["rows"]} == {steps[1]["grad_norm"]}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("vlm_fsdp8_offload", 4),
        pytest.param("vlm_moe_tp2_ep2_offload", 2, marks=pytest.mark.long),
        ("tower_mini_fsdp8_ep8_offload", 3),
        pytest.param("tower_mini_fsdp8_ep8_offload", 61, marks=pytest.mark.long),
    ],
)
def test_the_reported_models_train_on_it_and_offload_changes_no_bit(tmp_path: Path, name: str, layers: int) -> None:
    def steps(offload: str) -> list[tuple[float, float]]:
        options = ("--device", "sim-npu", "--steps", "3", "--set", f"model.num_layers={layers}", offload, "--json")
        out = run("-m", "hpcli", "train", str(CONFIGS / f"{name}.yaml"), *options, "--output", str(tmp_path / offload))
        events = [json.loads(line) for line in out.splitlines()]
        return [(event["loss"], event["grad_norm"]) for event in events if event["event"] == "step"]

    moved, stayed = steps("--enable-offload"), steps("--no-enable-offload")
    assert len(moved) == 3 and moved == stayed
    assert moved[-1][0] < moved[0][0]


@pytest.mark.parametrize("offload", ["--enable-offload", pytest.param("--no-enable-offload", marks=pytest.mark.long)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, offload: str) -> None:
    def steps(*options: str) -> list[tuple[int, float, float]]:
        common = ("--device", "sim-npu", "--set", "checkpoint.every=2", offload, "--json")
        out = run("-m", "hpcli", "train", str(CONFIGS / "fsdp4.yaml"), *common, *options)
        events = [json.loads(line) for line in out.splitlines()]
        return [(event["step"], event["loss"], event["grad_norm"]) for event in events if event["event"] == "step"]

    whole = steps("--steps", "4", "--output", str(tmp_path / "whole"))
    again = steps("--steps", "4", "--output", str(tmp_path / "again"), "--resume", str(tmp_path / "whole/checkpoints/step-00000002"))
    assert again == whole[2:]
