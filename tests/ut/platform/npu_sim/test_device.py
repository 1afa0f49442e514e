"""Runs the cases of ``device_cases.py`` in a process that has the simulated device, and reports each as a test of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CASES = Path(__file__).with_name("device_cases.py")
NAMES = [line.partition("(")[0].removeprefix("def ") for line in CASES.read_text().splitlines() if line.startswith("def test_")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Name of a case -> the failures of its runs, and one entry under "" for what went wrong outside of them."""
    report = tmp_path_factory.mktemp("device") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", str(CASES)], capture_output=True, text=True, timeout=120, check=False
    )
    found: dict[str, list[str]] = {"": [] if done.returncode in (0, 1) else [done.stdout[-4000:] + done.stderr[-4000:]]}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        failures = found.setdefault(case.attrib["name"].partition("[")[0], [])
        failures += [entry.text or "" for entry in case if entry.tag in ("failure", "error")]
    return found


def test_the_process_with_the_device_ends_as_it_should(outcomes: dict[str, list[str]]) -> None:
    assert outcomes[""] == []
    assert set(outcomes) == {"", *NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_on_the_device(name: str, outcomes: dict[str, list[str]]) -> None:
    for failure in outcomes.get(name, ["it did not run"]):
        pytest.fail(failure, pytrace=False)
