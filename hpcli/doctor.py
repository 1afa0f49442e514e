"""What this machine can run: versions, devices, backends, and how to get what is missing.

Every framework is imported in a process of its own: a broken installation is then a finding, not the end of the
examination, and the frameworks cannot disturb each other.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcli import __version__
from hpcli.report.formats import count_text

PROBE_SECONDS = 90

PACKAGES = ("numpy", "pydantic", "PyYAML", "rich", "typer", "matplotlib", "tensorboard", "safetensors")

REMEDIES = {
    "torch": "pip install 'torch==2.13.*'",
    "mindspore": "pip install 'hyper-parallel[mindspore]'   (Python below 3.13)",
    "torch_npu": "only for Ascend NPUs: install CANN (https://www.hiascend.com/cann), "
    "then pip install 'hyper-parallel[npu]'",
    "tensorboard": "only for logging.tensorboard: pip install 'hyper-parallel[tensorboard]'",
    "safetensors": "only for checkpoints: pip install safetensors",
}

# torch loads torch_npu by itself, and fails to import where torch_npu is installed without CANN.
_NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

_PROBES = {
    "torch": """
import torch, torch.distributed as dist
found = {"version": torch.__version__, "cuda_build": torch.version.cuda, "distributed": dist.is_available()}
found["backends"] = []
if dist.is_available():
    found["backends"] += ["gloo"] * dist.is_gloo_available() + ["nccl"] * dist.is_nccl_available()
found["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
from hyper_parallel.platform import npu_sim
found["sim-npu"] = npu_sim.obstacle()
""",
    "torch_npu": """
import torch, torch_npu
found = {"version": torch_npu.__version__, "backends": ["hccl"]}
found["npu"] = [torch.npu.get_device_name(i) for i in range(torch.npu.device_count())]
""",
    "mindspore": """
import mindspore
found = {"version": mindspore.__version__}
""",
}


def accelerator_count(device: str) -> int | None:
    """How many devices of the configuration's ``device`` this machine has; None for the CPU, which has no count.

    Reads device files and the variables that hide devices: importing a framework would cost seconds.
    """
    if device == "cuda":
        return _visible("CUDA_VISIBLE_DEVICES", "nvidia")
    if device == "npu":
        return _visible("ASCEND_RT_VISIBLE_DEVICES", "davinci")
    if device == "auto":
        return accelerator_count("npu") or accelerator_count("cuda") or None
    return None


def _visible(variable: str, device_file: str) -> int:
    present = sum(
        bool(re.fullmatch(rf"{device_file}\d+", entry.name)) for entry in Path("/dev").glob(device_file + "*")
    )
    chosen = os.environ.get(variable)
    if chosen is None:
        return present
    return min(present, len([part for part in chosen.split(",") if part.strip() not in ("", "-1")]))


def examine() -> dict[str, Any]:
    """Everything ``hpcli doctor`` reports, ready for JSON. ``usable``: at least one framework can be imported."""
    frameworks = _probe_all()
    torch, npu = frameworks["torch"], frameworks["torch_npu"]
    return {
        "hpcli": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": {"platform": platform.platform(), **_cpus(), **_memory()},
        "frameworks": frameworks,
        "packages": {name: _installed(name) for name in PACKAGES},
        "devices": {
            "cuda": torch.get("cuda", []),
            "npu": npu.get("npu", []),
            "cann": _cann(),
            "sim-npu": {"usable": torch.get("sim-npu", "torch is missing") is None, "obstacle": torch.get("sim-npu")},
        },
        "backends": {
            "gloo": "gloo" in torch.get("backends", []),
            "nccl": "nccl" in torch.get("backends", []),
            "hccl": "hccl" in npu.get("backends", []),
        },
        "launcher": _launcher(),
        "usable": any(frameworks[name]["state"] == "ok" for name in ("torch", "mindspore")),
    }


def _probe_all() -> dict[str, dict[str, Any]]:
    """Import each framework in a process of its own, all at once."""
    running = {}
    for name, code in _PROBES.items():
        if _installed(name) is None:
            continue
        running[name] = subprocess.Popen(
            [sys.executable, "-c", f"{code}\nimport json\nprint('\\n' + json.dumps(found))"],
            env={**os.environ, **_NO_AUTOLOAD},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    found: dict[str, dict[str, Any]] = {name: {"state": "missing"} for name in _PROBES}
    for name, process in running.items():
        found[name] = {"version": _installed(name), **_outcome(process)}
    return found


def _outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"state": "broken", "error": f"import took longer than {PROBE_SECONDS} s"}
    if process.returncode == 0:
        try:
            return {"state": "ok", **json.loads(output.strip().splitlines()[-1])}
        except (ValueError, IndexError):
            return {"state": "broken", "error": "import printed nothing that can be read"}
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    cause = lines[-1][:300] if lines else ""
    if process.returncode < 0:
        cause = f"ended by signal {-process.returncode}" + (f": {cause}" if cause else "")
    return {"state": "broken", "error": cause or f"exit code {process.returncode}"}


def _installed(name: str) -> str | None:
    for distribution in (name, name.replace("_", "-")):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cpus() -> dict[str, Any]:
    return {"cores": os.cpu_count() or 1, "usable_cores": len(os.sched_getaffinity(0))}


def _memory() -> dict[str, Any]:
    """Total and available memory in bytes, and the limit of the container, if there is one."""
    found: dict[str, Any] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                found[{"MemTotal": "memory", "MemAvailable": "memory_available"}[key]] = (
                    int(value.split()[0]) * 1024
                )
    except (OSError, ValueError):
        pass
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < found.get("memory", 0):
            found["memory_limit"] = int(text)
        break
    return found


def _cann() -> str | None:
    """The folder of the CANN toolkit, which every use of an Ascend NPU needs."""
    for candidate in (os.environ.get("ASCEND_TOOLKIT_HOME"), "/usr/local/Ascend/ascend-toolkit/latest"):
        if candidate and Path(candidate).is_dir():
            return candidate
    return None


def _launcher() -> dict[str, Any] | None:
    from hpcli.launch.environment import detect_launcher

    try:
        joined = detect_launcher(os.environ)
    except Exception as error:  # noqa: BLE001  (a half-set environment is a finding too)
        return {"launcher": "broken", "error": str(error)}
    if joined is None:
        return None
    return {"launcher": joined.launcher, "rank": joined.rank, "world_size": joined.world_size}


def report_lines(findings: dict[str, Any]) -> list[str]:
    """The findings for a person: what is there, and under "To get what is missing" the commands for the rest."""
    system, devices = findings["system"], findings["devices"]
    lines = [
        f"hpcli {findings['hpcli']}",
        "",
        f"  python       {findings['python']['version']}  ({findings['python']['executable']})",
        f"  system       {system['platform']}",
        f"  CPU          {count_text(system['usable_cores'], 'core')} usable of {system['cores']}",
        f"  memory       {_memory_text(system)}",
        f"  launcher     {_launcher_text(findings['launcher'])}",
        "",
        "Frameworks",
    ]
    for name, found in findings["frameworks"].items():
        lines.append(f"  {name:<12} {_state_text(found)}")
    lines += ["", "Devices"]
    for kind in ("cuda", "npu"):
        names = devices[kind]
        lines.append(f"  {kind:<12} {len(names)} x {names[0]}" if names else f"  {kind:<12} none found")
    lines.append(f"  CANN         {devices['cann'] or 'not found'}")
    simulated = devices["sim-npu"]
    lines.append(f"  sim-npu      {'usable (simulated)' if simulated['usable'] else simulated['obstacle'] or 'needs torch'}")
    lines += ["", "Distributed backends"]
    for name, device in (("gloo", "CPU"), ("nccl", "CUDA"), ("hccl", "Ascend")):
        lines.append(
            f"  {name:<12} {'available' if findings['backends'][name] else 'not available'} ({device})"
        )
    lines += ["", "Packages"]
    for name, version in findings["packages"].items():
        lines.append(f"  {name:<12} {version or 'missing'}")
    if wanted := _remedies(findings):
        lines += ["", "To get what is missing", *(f"  {name:<12} {how}" for name, how in wanted.items())]
    return lines


def _state_text(found: dict[str, Any]) -> str:
    version = found.get("version") or ""
    return {"ok": version, "missing": "missing"}.get(found["state"]) or f"{version} BROKEN: {found['error']}"


def _memory_text(system: dict[str, Any]) -> str:
    parts = [
        f"{system[key] / 2**30:.1f} GiB {words}"
        for key, words in (
            ("memory", "in all"),
            ("memory_available", "available"),
            ("memory_limit", "allowed to this container"),
        )
        if key in system
    ]
    return ", ".join(parts) or "unknown"


def _launcher_text(launcher: dict[str, Any] | None) -> str:
    if launcher is None:
        return "none; hpcli train starts the ranks itself"
    if "error" in launcher:
        return f"BROKEN: {launcher['error']}"
    return f"{launcher['launcher']}, this is rank {launcher['rank']} of {launcher['world_size']}"


def _remedies(findings: dict[str, Any]) -> dict[str, str]:
    wanted = {}
    for name, found in findings["frameworks"].items():
        if found["state"] == "missing":
            wanted[name] = REMEDIES[name]
        elif found["state"] == "broken":
            needs = name == "torch_npu" and findings["devices"]["cann"] is None
            wanted[name] = (
                "install CANN (https://www.hiascend.com/cann); until then, scripts other than hpcli need "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to import torch"
                if needs
                else f"reinstall: pip install --force-reinstall {name}=={found['version']}"
            )
    for name, version in findings["packages"].items():
        if version is None:
            wanted[name] = REMEDIES.get(name, f"pip install {name}")
    return wanted
