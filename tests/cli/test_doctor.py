from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcli import doctor


def test_shows_versions_backends_and_remedies(hpcli: Any) -> None:
    done = hpcli("doctor")
    assert done.returncode == 0 and done.stderr == ""
    for part in (
        "python",
        "torch",
        "mindspore",
        "torch_npu",
        "numpy",
        "gloo",
        "nccl",
        "hccl",
        "cores",
        "GiB",
        "launcher",
    ):
        assert part in done.stdout
    findings = json.loads(hpcli("doctor", "--json").stdout)
    assert findings["frameworks"]["torch"]["state"] == "ok" and findings["backends"]["gloo"] is True
    for name, found in findings["frameworks"].items():
        assert (found["state"] == "missing") == (f"{name:<12} missing" in done.stdout)


def test_a_launcher_is_recognised(hpcli: Any) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert "torchrun, this is rank 1 of 2" in hpcli("doctor", env=env).stdout
    assert "BROKEN" in hpcli("doctor", env={**env, "WORLD_SIZE": "two"}).stdout


def fake_package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    (folder / f"{name}-9.9.dist-info").mkdir()
    (folder / f"{name}-9.9.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n"
    )


@pytest.mark.parametrize(
    "code, cause",
    [
        ("raise ImportError('libhccl.so: cannot open shared object file')", "libhccl.so"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
)
def test_a_broken_package_is_a_finding_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, cause: str
) -> None:
    fake_package(tmp_path, "torch_npu", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    findings = doctor.examine()
    assert findings["usable"] and findings["frameworks"]["torch"]["state"] == "ok"
    assert findings["frameworks"]["torch_npu"]["state"] == "broken"
    assert cause in findings["frameworks"]["torch_npu"]["error"]
    text = "\n".join(doctor.report_lines(findings))
    assert "BROKEN" in text and "install CANN" in text


def test_devices_are_counted_without_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dev:
        def __init__(self, path: str) -> None:
            assert path == "/dev"

        def glob(self, pattern: str) -> list[Path]:
            names = ("nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm")
            return [Path(name) for name in names if Path(name).match(pattern)]

    monkeypatch.setattr(doctor, "Path", Dev)
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    assert [doctor.accelerator_count(device) for device in ("cpu", "cuda", "npu", "auto")] == [None, 4, 0, 4]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert doctor.accelerator_count("auto") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.accelerator_count("auto") is None
