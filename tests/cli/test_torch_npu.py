"""The real torch_npu on a machine without CANN: everything but the device goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FSDP4 = str(ROOT / "examples/configs/fsdp4.yaml")


@pytest.fixture(scope="module")
def with_torch_npu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which torch_npu is installed."""
    folder = tmp_path_factory.mktemp("torch_npu")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "torch_npu==2.13.*"]
    subprocess.run(pip, check=True, timeout=300)
    return {"PYTHONPATH": f"{ROOT}:{folder}"}


@pytest.mark.long
def test_torch_npu_without_cann(hpcli: Any, with_torch_npu: dict[str, str]) -> None:
    plain = subprocess.run(
        [sys.executable, "-c", "import torch"], env={**os.environ, **with_torch_npu}, capture_output=True, text=True, check=False
    )
    assert "Failed to load the backend extension: torch_npu" in plain.stderr  # what every other script meets

    doctor = hpcli("doctor", env=with_torch_npu)
    assert doctor.returncode == 0 and "BROKEN: ImportError: libhccl.so: cannot open shared object file" in doctor.stdout
    assert "install CANN (https://www.hiascend.com/cann)" in doctor.stdout

    for device in ("auto", "cpu", "sim-npu"):
        done = hpcli("train", FSDP4, "--steps", "1", "--device", device, env=with_torch_npu)
        assert done.returncode == 0 and "4 of 4 ranks hold" in done.stdout, done.stderr

    for command in (("train", FSDP4), ("check-norm", "--ranks", "2")):
        refused = hpcli(*command, "--device", "npu", env=with_torch_npu)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
        assert "npu: there is no such device on this machine (`hpcli doctor` shows what is missing)" in refused.stderr
