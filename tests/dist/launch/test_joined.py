"""The same rank program under torchrun and under srun's environment variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from hpcli.launch import RankServer

from .conftest import HERE

JOIN = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from hpcli.launch import LaunchError, detect_launcher, run_joined
joined = detect_launcher(os.environ)
try:
    run_joined(
        joined, "launch_programs:report_bits", json.loads(sys.argv[2]), timeout_seconds=20,
        on_event=lambda event: print(json.dumps({**event, "launcher": joined.launcher}), flush=True),
    )
except LaunchError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


def clean_environment(**variables: str) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MS_", "OMP_", "GLOO_"))}
    return {**base, **variables}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def expected(torch_server: RankServer) -> dict[str, Any]:
    """What rank 0 of two local ranks says."""
    local: list[dict[str, Any]] = []
    torch_server.run("launch_programs:report_bits", {}, 2, timeout_seconds=20, on_event=local.append)
    (event,) = [event for event in local if event["rank"] == 0]
    assert event["threads"] == 1
    return event


def test_torchrun_gives_the_bits_of_local_ranks(expected: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "--no-python", sys.executable, "-c", JOIN, str(HERE), "{}"]
    done = subprocess.run(
        command,
        env=clean_environment(OMP_NUM_THREADS="2"),
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{**expected, "launcher": "torchrun"}]


def test_srun_gives_the_bits_of_local_ranks_and_a_failing_rank_says_so(expected: dict[str, Any]) -> None:
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, str(HERE), json.dumps({"rank": 1, "how": "raise"})],
            env=clean_environment(**step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (good, _), (_, errors) = [rank.communicate(timeout=100) for rank in ranks]
    assert json.loads(good) == {**expected, "launcher": "srun"}
    assert ranks[1].returncode == 1
    assert (
        f"rank 1 on {socket.gethostname()} failed in step 1 (forward): ValueError: a planted error" in errors
    )
