"""When the simulated device refuses to start, and how a real one that does not load is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hpcli.launch import warm
from hpcli.launch.errors import LaunchError
from hpcli.launch.local import server_environment
from hyper_parallel.platform import npu_sim
from hyper_parallel.platform.torch.loading import DeviceMissingError, load_torch_npu

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def test_it_can_start_here_and_looking_changes_nothing() -> None:
    assert npu_sim.obstacle() is None
    assert torch._C._get_privateuse1_backend_name() == "privateuseone" and not hasattr(torch, "npu")


def test_a_torch_on_which_it_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(npu_sim.SimulatedNpuError, match=r"tested on torch 2.13 only, not on torch 2.14.0\+cpu: pip install"):
        npu_sim.install()
    assert not hasattr(torch, "npu") and torch._C._get_privateuse1_backend_name() == "privateuseone"


def test_looking_needs_no_private_part_of_torch() -> None:
    program = (
        "import torch\n"
        "del torch._C._acc, torch._C._to_dlpack, torch._C.DispatchKeySet, torch.storage._to\n"
        "torch.__version__ = '3.0'\n"
        "from hyper_parallel.platform import npu_sim\n"
        "print(npu_sim.obstacle())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("it was tested on torch 2.13 only, not on torch 3.0"), done.stderr


def test_it_does_not_start_beside_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("torch_npu")
    real.__version__ = "2.13.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", real)
    with pytest.raises(npu_sim.SimulatedNpuError, match="torch_npu, the real device, is loaded in this process"):
        npu_sim.install()
    assert torch._C._is_multithreading_enabled()


def test_without_torch_npu_the_message_says_what_to_install() -> None:
    with pytest.raises(DeviceMissingError, match=r"needs torch_npu: install CANN .* then pip install 'hyper-parallel\[npu\]'"):
        load_torch_npu()


@pytest.mark.parametrize("before", [None, "1"])
def test_torch_npu_without_cann_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(
        f"import os; os.environ['{AUTOLOAD}'] = '0'\n"
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(AUTOLOAD, raising=False)
    if before is not None:
        monkeypatch.setenv(AUTOLOAD, before)
    with pytest.raises(DeviceMissingError, match=r"installed but does not load \(libhccl.so: .*\)\. Install CANN"):
        load_torch_npu()
    assert os.environ.get(AUTOLOAD) == before
    monkeypatch.setattr(warm, "load", lambda: None)
    with pytest.raises(LaunchError, match="device npu: torch_npu is installed but does not load"):
        warm.load_npu()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu", "sim-npu"])
def test_rank_servers_load_no_extension_unasked_and_hide_cuda_where_they_warm_up(device: str) -> None:
    environment = server_environment({"CUDA_VISIBLE_DEVICES": "3"}, device)
    assert environment[AUTOLOAD] == "0"
    assert environment["CUDA_VISIBLE_DEVICES"] == ("" if device in ("cpu", "sim-npu") else "3")


def test_torch_is_imported_beside_an_extension_that_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so')\n")
    information = tmp_path / "torch_npu-9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 9.9\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    program = (
        "import os\n"
        "from hyper_parallel.platform.torch.loading import import_torch\n"
        "import_torch()\n"
        "import torch\n"
        "print(torch.ones(2).sum().item(), os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop(AUTOLOAD, None)

    def output(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)

    assert output(program).stdout == "2.0 None\n"
    assert "Failed to load the backend extension: torch_npu" in output("import torch").stderr  # what it guards against
