"""What happens to hpcli when its output, its package or its user goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcli import app
from hpcli.config.errors import ConfigError, Problem
from hpcli.launch.errors import RankFailure
from hpcli.report import ReportError

ROOT = Path(__file__).parents[2]


def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m hpcli schema | true"
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        assert done.returncode in (0, 1)


def test_a_full_disk_behind_stdout_is_a_message(hpcli: Any) -> None:
    with open("/dev/full", "w") as full:
        done = hpcli("schema", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device\n"


def test_a_closed_stderr_does_not_change_the_exit_code(hpcli: Any, bad: str) -> None:
    with open("/dev/full", "w") as full:
        assert hpcli("validate", bad, stderr=full).returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding_is_served(
    hpcli: Any, good: str, tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "größe→.yaml").write_text((tmp_path / good).read_text())
    done = hpcli("validate", "größe→.yaml", env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert done.returncode == 0 and "is valid" in done.stdout


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ConfigError([Problem("x.yaml", 3, None, "a.b", "no")]), 2, "error: x.yaml:3: a.b: no\n"),
        (ReportError("cannot write the metrics /x: full"), 1, "error: cannot write the metrics /x: full\n"),
        (RankFailure("rank 3 was killed", rank=3, step=7, details="where"), 1, "error: rank 3 was killed\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: Permission denied: /x\n"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, "error: torch is not installed; "),
        (
            ZeroDivisionError("oops"),
            1,
            "error: internal error: ZeroDivisionError: oops; run again with --debug",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_whatever_a_command_raises_ends_as_a_message(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(app, "overrides_of", fail)
    monkeypatch.setattr("hpcli.report.failures.silence", lambda stream: None)
    assert app.main(["validate", "x.yaml"]) == code
    said = capfd.readouterr().err
    assert said.startswith(message) if message else said == ""
    assert "Traceback" not in said
    if isinstance(error, RankFailure):
        app.main(["validate", "x.yaml", "--debug"])
        assert "Traceback" in (said := capfd.readouterr().err) and "where\n" in said


def test_closed_standard_output_is_no_error(good: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m hpcli validate {good} >&- 2>err"
    code = subprocess.run(command, shell=True, cwd=tmp_path, check=False).returncode
    assert (code, (tmp_path / "err").read_text()) == (0, "")
