"""Shared by the launcher's tests: servers, and a check that nothing stays behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcli.launch import RankServer

HERE = Path(__file__).parent


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_ended(pids: list[int], seconds: float = 5.0) -> list[int]:
    """The processes that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture(scope="package")
def programs() -> Iterator[None]:
    """Make `launch_programs` importable here and, because servers copy sys.path, in the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield


@pytest.fixture(scope="package")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that takes the place of /tmp; it must be empty when all servers are closed."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="package")
def server(programs: None, temporary: Path) -> Iterator[RankServer]:
    """One server without torch, ready in a tenth of a second."""
    with RankServer(warm_up="launch_programs:no_warm_up") as server:
        yield server


@pytest.fixture(scope="package")
def torch_server(programs: None, temporary: Path) -> Iterator[RankServer]:
    with RankServer() as server:
        yield server
