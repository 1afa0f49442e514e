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


PAIR = """
import os, signal, sys
import torch, torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def survivors_error() -> str:
    """The last line that one of two processes prints whose peer is killed while it waits for it in an all-reduce; nobody watches
    them. Run on rank 0; "" on the others."""
    if os.environ.get("RANK", "0") != "0":
        return ""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        survivor, peer = [
            subprocess.Popen(
                [sys.executable, "-c", PAIR, str(Path(folder, "store")), rank],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in "01"
        ]
        try:
            errors = survivor.communicate(timeout=60)[1]
        finally:
            for process in (survivor, peer):
                process.kill()
                process.wait()
    return errors.strip().rpartition("\n")[2] if survivor.returncode else ""


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
