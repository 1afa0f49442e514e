"""hpcli as its users run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_",
    "MS_",
    "TORCHELASTIC_",
)
ROOT = Path(__file__).parents[2]

Hpcli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hpcli(tmp_path: Path) -> Hpcli:
    """Run hpcli in an empty folder, outside any launcher, unless ``env`` says otherwise."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
        clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100", **(env or {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [sys.executable, "-m", "hpcli", *arguments],
            cwd=tmp_path,
            env=clean,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
            **streams,
        )

    return run


@pytest.fixture
def good(tmp_path: Path) -> str:
    """A configuration for 4 ranks, by the name it has in the folder where hpcli runs."""
    (tmp_path / "good.yaml").write_text(
        "device: cpu\n"
        "model: {preset: decoder-tiny}\n"
        "training: {steps: 3, global_batch_size: 8, seq_length: 32}\n"
        "parallelism: {data_parallel_shard: 4}\n"
    )
    return "good.yaml"


@pytest.fixture
def bad(tmp_path: Path) -> str:
    """A configuration with a misspelt key in line 3."""
    (tmp_path / "bad.yaml").write_text("device: cpu\ntraining:\n  stepz: 3\n")
    return "bad.yaml"
