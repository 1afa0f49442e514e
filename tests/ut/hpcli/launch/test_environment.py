"""Which launcher's rank a process is, from environment variables alone."""

from __future__ import annotations

import pytest

from hpcli.launch import Joined, LaunchError, detect_launcher
from hpcli.launch.environment import expand_tasks, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "8",
    "MS_NODE_ID": "3",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
}


def test_plain_shell_is_no_rank() -> None:
    assert detect_launcher({"PATH": "/usr/bin"}) is None


def test_torchrun() -> None:
    assert detect_launcher(TORCHRUN) == Joined("torchrun", 5, 8, 1, 4, "env://")


def test_ranks_of_one_host_are_known_only_where_the_launcher_counts_them() -> None:
    one_host = {**TORCHRUN, "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    step = {**SRUN, "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "6"}
    uncounted = {name: value for name, value in one_host.items() if name != "LOCAL_WORLD_SIZE"}
    results = [detect_launcher(environ) for environ in (one_host, step, TORCHRUN, SRUN, uncounted)]
    assert [joined.one_host for joined in results if joined] == [True, True, False, False, False]


def test_srun_step_finds_the_first_host_and_a_port_of_the_step() -> None:
    joined = detect_launcher(SRUN)
    assert joined == Joined("srun", 5, 7, 1, 3, f"tcp://gpu07:{15000 + (1000 * 31 + 2) % 15000}")
    assert joined == detect_launcher({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,3"})


def test_srun_step_uses_the_master_address_that_the_user_set() -> None:
    joined = detect_launcher({**SRUN, "MASTER_ADDR": "fe80::1", "MASTER_PORT": "4000"})
    assert joined is not None
    assert joined.init_method == "tcp://[fe80::1]:4000"


@pytest.mark.parametrize(
    "environ",
    [
        # an sbatch script: a job and even a rank, but no step
        {"SLURM_JOB_ID": "1000", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu[07-08]"},
        # SLURM's numbers for its batch and its interactive step
        {**SRUN, "SLURM_STEP_ID": "4294967291"},
        {**SRUN, "SLURM_STEP_ID": "4294967290"},
        # srun --pty bash
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40000"},
    ],
)
def test_shells_inside_slurm_are_no_ranks(environ: dict[str, str]) -> None:
    assert detect_launcher(environ) is None


def test_torchrun_inside_a_srun_step_is_torchrun() -> None:
    joined = detect_launcher({**SRUN, **TORCHRUN})
    assert joined is not None
    assert joined.launcher == "torchrun"


def test_msrun_worker_and_scheduler() -> None:
    assert detect_launcher(MSRUN) == Joined("msrun", 3, 8, 3, 8, "tcp://10.0.0.1:8118")
    scheduler = detect_launcher({**MSRUN, "MS_ROLE": "MS_SCHED", "MS_NODE_ID": ""})
    assert scheduler is not None
    assert scheduler.scheduler


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "abc"}, "torchrun's environment: RANK=abc is not a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is not a whole number"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is not less than the number of ranks, 8"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is less than 1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4 local ranks"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({**SRUN, "SLURM_PROCID": "7"}, "srun's environment: SLURM_PROCID=7 is not less than"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE=four cannot be read"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 is not one of the 2 nodes"),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu["}, "SLURM_STEP_NODELIST=gpu. names no host"),
        ({**SRUN, "SLURM_STEP_ID": "x"}, "SLURM_STEP_ID=x is not a whole number"),
        ({**MSRUN, "MS_NODE_ID": ""}, "MS_NODE_ID is not set"),
        ({**MSRUN, "MS_ROLE": "MS_PSERVER"}, "MS_ROLE=MS_PSERVER is neither"),
    ],
)
def test_senseless_variables_are_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        detect_launcher(environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-010,12],x", "gpu007"),
        ("gpu[3,1]", "gpu3"),
        ("rack[1-2]node[05-06]", "rack1node05"),
        ("rack[1-2]-a.example.org,b", "rack1-a.example.org"),
        ("", ""),
        ("gpu[", ""),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("8", [8]), ("4(x2),3", [4, 4, 3]), ("2,1(x3)", [2, 1, 1, 1]), ("x", None), ("", None)],
)
def test_expand_tasks(text: str, tasks: list[int] | None) -> None:
    assert expand_tasks(text) == tasks
