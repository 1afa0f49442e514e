"""Runs of hpcli itself, for faults that lie in launching."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
model: {preset: decoder-tiny, num_layers: 1}
training: {steps: 3, global_batch_size: 4, seq_length: 16}
launch: {timeout_seconds: 3, ranks: 2}
device: cpu
"""


def error_of_training(plant: str) -> str:
    """What ``hpcli train`` on 2 ranks says when a failure is planted into it. Run on rank 0; "" on the others.

    Args:
        plant: as HPCLI_PLANT takes it.
    """
    if os.environ.get("RANK", "0") != "0":
        return ""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "two.yaml").write_text(CONFIG)
        done = subprocess.run(
            [sys.executable, "-m", "hpcli", "train", "two.yaml"],
            cwd=folder,
            env={**environment, "HPCLI_PLANT": plant, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return errors[0] if done.returncode == 1 and errors else f"exit code {done.returncode}: {done.stderr[-500:]}"
