from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hpcli as package

COMMANDS = ("train", "validate", "plan", "schema", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(hpcli: Any, command: str) -> None:
    done = hpcli(command, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(rf"Examples?:\n +hpcli {command}", done.stdout)
    assert "\x1b" not in done.stdout


def test_examples_keep_a_line_each(hpcli: Any) -> None:
    lines = [line.strip() for line in hpcli("train", "--help", env={"COLUMNS": "80"}).stdout.splitlines()]
    assert "hpcli train examples/configs/fsdp8.yaml --ranks 4 --steps 20" in lines
    assert "torchrun --nproc-per-node 4 -m hpcli train examples/configs/fsdp4.yaml" in lines


def test_no_option_is_cut_off_at_80_columns(hpcli: Any) -> None:
    text = hpcli("train", "--help", env={"COLUMNS": "80"}).stdout
    for option in (
        "--ranks", "--steps", "--enable-offload", "--no-enable-offload", "--accumulate-allreduce-grads-in-fp32",
        "--no-accumulate-allreduce-grads-in-fp32", "--device", "--set", "--output", "--json", "--debug",
    ):  # fmt: skip
        assert re.search(rf"{option}\b", text)


def test_without_a_command_the_help_appears(hpcli: Any) -> None:
    done = hpcli()
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


def test_version(hpcli: Any) -> None:
    assert hpcli("--version").stdout == f"hpcli {package.__version__}\n"


def test_help_is_quick(hpcli: Any) -> None:
    def seconds() -> float:
        begin = time.monotonic()
        hpcli("--help")
        return time.monotonic() - begin

    # 0.3 s where nothing else runs; the fastest of several, because tests share their cores.
    assert min(seconds() for _ in range(5)) < 1.0


def test_help_loads_no_framework() -> None:
    code = (
        "import sys; from hpcli.app import main; main(['train', '--help']); "
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'mindspore', 'pydantic_core') if m in sys.modules][:3])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert not {"torch", "numpy", "matplotlib", "mindspore"} & set(re.findall(r"\w+", loaded))


def test_schema_is_a_json_schema_of_the_file(hpcli: Any) -> None:
    done = hpcli("schema")
    assert done.returncode == 0
    schema = json.loads(done.stdout)
    assert {"platform", "model", "training", "parallelism"} <= set(schema["properties"])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_config_completes_to_yaml_files_and_folders(hpcli: Any, tmp_path: Path, shell: str) -> None:
    (tmp_path / "configs").mkdir()
    for name in ("configs/a.yaml", "configs/b.yml", "configs/c.txt", "notes.txt"):
        (tmp_path / name).write_text("")

    def completions(typed: str) -> list[str]:
        words = f"hpcli train {typed}"
        variables = {
            "bash": {"COMP_WORDS": words, "COMP_CWORD": "2"},
            "zsh": {"_TYPER_COMPLETE_ARGS": words},
        }[shell]
        text = hpcli(env={"_HPCLI_COMPLETE": f"complete_{shell}", **variables}).stdout
        return re.findall(r"configs/\S*?(?:yaml|yml|txt)|configs/(?=\W|$)|notes.txt", text.replace('"', " "))

    assert completions("conf") == ["configs/"]
    assert completions("configs/") == ["configs/a.yaml", "configs/b.yml"]
