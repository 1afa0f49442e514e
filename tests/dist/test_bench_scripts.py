"""What the benchmarks compare with must itself run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_that_the_start_is_measured_against() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "bench/torchrun_script.py"), "2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(" loss")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"]
