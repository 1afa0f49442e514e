from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TORCHRUN = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def rank(number: int) -> dict[str, str]:
    return {**TORCHRUN, "RANK": str(number), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "4"}


def test_a_good_file_shows_the_layout(hpcli: Any, good: str) -> None:
    done = hpcli("validate", good)
    assert (done.returncode, done.stderr) == (0, "")
    assert "good.yaml is valid" in done.stdout
    assert "dp_shard 4 = 4 ranks" in done.stdout
    assert "8 sequences a step = 4 data-parallel ranks x 1 micro-batch of 2" in done.stdout
    assert "params float32, compute float32, reduce float32" in done.stdout


def test_json_holds_the_layout_and_the_whole_configuration(hpcli: Any, good: str) -> None:
    done = hpcli(
        "validate", good, "--json", "--set", "training.compute_dtype=bfloat16",
        "--no-accumulate-allreduce-grads-in-fp32", "--enable-offload",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    layout = json.loads(done.stdout)
    assert layout["valid"] is True and layout["world_size"] == 4
    assert layout["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "ep": 1, "tp": 1}
    assert layout["batch"]["micro_batches"] == 1 and layout["batch"]["tokens_per_step"] == 256
    assert layout["dtypes"] == {"params": "float32", "compute": "bfloat16", "reduce": "bfloat16"}
    assert layout["config"]["fsdp_config"]["enable_offload"] is True


def test_a_bad_file_is_one_message_with_line_and_key(hpcli: Any, bad: str) -> None:
    done = hpcli("validate", bad)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: bad.yaml:3: training.stepz: ")
    assert "steps" in done.stderr and "Traceback" not in done.stderr


def test_a_bad_file_as_json_is_json_on_stdout_and_text_on_stderr(hpcli: Any, bad: str) -> None:
    done = hpcli("validate", bad, "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert answer["valid"] is False
    assert [(p["file"], p["line"], p["key"]) for p in answer["problems"]] == [
        ("bad.yaml", 3, "training.stepz")
    ]
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "arguments, start",
    [
        (["--steps", "0"], "error: --steps 0: training.steps: "),
        (["--device", "tpu"], "error: --device tpu: device: "),
        (["--set", "training.stepz=1"], "error: --set training.stepz=1: "),
        (["--set", "nonsense"], "error: --set nonsense: "),
        (["--ranks", "0"], "error: --ranks 0: "),
        (["--ranks", "three"], "error: Invalid value for '--ranks'"),
        (["--ranks", "3"], "error: good.yaml:4: parallelism.data_parallel_shard: "),
        (["--stpes", "3"], "error: No such option: --stpes"),
        (["again.yaml"], "error: Got unexpected extra argument"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(
    hpcli: Any, good: str, arguments: list[str], start: str
) -> None:
    for command in ("validate", "train"):
        done = hpcli(command, good, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(start)
        assert "Traceback" not in done.stderr


def test_an_option_wins_over_set(hpcli: Any, good: str) -> None:
    done = hpcli("validate", good, "--json", "--steps", "7", "--set", "training.steps=9")
    assert json.loads(done.stdout)["config"]["training"]["steps"] == 7


def test_wrong_requests_are_messages(hpcli: Any, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for arguments in (["validate", "none.yaml"], ["validate", "folder.yaml"], ["validate"], ["valdate"]):
        done = hpcli(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_debug_shows_where(hpcli: Any, bad: str) -> None:
    done = hpcli("validate", bad, "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: bad.yaml:3: ")


def test_under_a_launcher_only_the_first_rank_speaks(hpcli: Any, good: str, bad: str) -> None:
    first, other = (hpcli("validate", bad, env=rank(number)) for number in (0, 1))
    assert (first.returncode, other.returncode) == (2, 2)
    assert first.stderr.startswith("error: ") and (other.stdout, other.stderr) == ("", "")
    first, other = (hpcli("validate", good, env=rank(number)) for number in (0, 1))
    assert (first.returncode, other.returncode) == (0, 0)
    assert "is valid" in first.stdout and (other.stdout, other.stderr) == ("", "")


def test_a_wrong_request_leaves_no_folder(hpcli: Any, bad: str, tmp_path: Path) -> None:
    hpcli("train", bad, "--output", "out")
    hpcli("train", bad)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml")))
def test_every_example_is_valid(hpcli: Any, path: Path) -> None:
    done = hpcli("validate", str(path))
    assert (done.returncode, done.stderr) == (0, "")
