"""What `hpcli train` hands to the training loop, and what it makes of the answer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcli import app
from hpcli.config.errors import ConfigError, Problem


class Loop(ModuleType):
    """Stands in for hpcli.train.run and remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__("hpcli.train.run")
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.answer = 0

    def train(self, resolved: Any, **arguments: Any) -> int:
        self.calls.append((resolved, arguments))
        return self.answer


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loop:
    stand_in = Loop()
    monkeypatch.setitem(sys.modules, "hpcli.train.run", stand_in)
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MS_ROLE", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    return stand_in


def test_options_reach_the_loop(loop: Loop, good: str) -> None:
    options = ["--ranks", "4", "--steps", "7", "--enable-offload", "--no-accumulate-allreduce-grads-in-fp32"]
    assert (
        app.main(
            ["train", good, *options, "--set", "optimizer.lr=1e-2", "--output", "out", "--json", "--debug"]
        )
        == 0
    )
    resolved, arguments = loop.calls[0]
    assert arguments == {"config_file": Path(good), "output": Path("out"), "resume": None, "json": True, "debug": True}
    assert Path("out").is_dir()
    config = resolved.config
    assert config.training.steps == 7 and config.optimizer.lr == 0.01 and resolved.world_size == 4
    assert config.fsdp_config.enable_offload is True
    assert config.training.accumulate_allreduce_grads_in_fp32 is False


def test_the_default_folder_is_named_after_the_file(loop: Loop, good: str) -> None:
    assert app.main(["train", good]) == app.main(["train", good]) == 0
    first, second = (arguments["output"] for _, arguments in loop.calls)
    assert first != second and first.is_dir() and second.is_dir()
    assert first.parent == Path("runs") and first.name.startswith("good-")


@pytest.mark.parametrize("answer, said", [(0, ""), (1, ""), (130, "interrupted\n")])
def test_the_loops_answer_is_the_exit_code(
    loop: Loop, good: str, capfd: pytest.CaptureFixture[str], answer: int, said: str
) -> None:
    loop.answer = answer
    assert app.main(["train", good]) == answer
    assert capfd.readouterr().err == said


def test_only_the_first_rank_makes_the_folder(loop: Loop, good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert app.main(["train", good, "--output", "out"]) == 0
    assert len(loop.calls) == 1 and not Path("out").exists()


def test_a_folder_that_cannot_be_made_ends_before_the_loop(
    loop: Loop, good: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert app.main(["train", good, "--output", "file/out"]) == 1
    assert capfd.readouterr().err == "error: cannot write to the output folder file/out: Not a directory\n"
    assert loop.calls == []


@pytest.mark.parametrize("rank, said", [("0", "error: good.yaml: data.path: gone\n"), ("1", "")])
def test_what_only_the_loop_can_find_is_said_once_and_leaves_no_folder(
    loop: Loop,
    good: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rank: str,
    said: str,
) -> None:
    def train(*_: Any, **__: Any) -> int:
        raise ConfigError([Problem("good.yaml", None, None, "data.path", "gone")])

    monkeypatch.setattr(loop, "train", train)
    launcher = {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": rank, "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    assert app.main(["train", good]) == 2
    assert capfd.readouterr().err == said
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
