"""Recognises the launcher that started this process from its environment variables.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR; a step of srun sets SLURM_PROCID and SLURM_STEP_ID;
msrun sets MS_ROLE, MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT and MS_NODE_ID. A bare sbatch shell, or an
interactive one, is no rank: local ranks are started from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcli.launch.errors import LaunchError

# SLURM numbers the steps that are shells or containers for others from the top: interactive, batch, extern, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Joined:
    """This process as another launcher's rank.

    `one_host` is True where all ranks are known to be on this machine. `scheduler` is True for msrun's own
    coordinating process, which runs the same command but is no rank.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    one_host: bool = False
    scheduler: bool = False


def detect_launcher(environ: Mapping[str, str]) -> Joined | None:
    """The launcher's rank that this process is, or None when ranks are to be started here.

    Raises LaunchError where a variable is missing or makes no sense.
    """
    if all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")):
        return _torchrun(_Variables("torchrun", environ))
    if environ.get("MS_ROLE") and environ.get("MS_SCHED_HOST"):
        return _msrun(_Variables("msrun", environ))
    if environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID"):
        return _srun(_Variables("srun", environ))
    return None


class _Variables:
    def __init__(self, launcher: str, environ: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.environ = environ

    def error(self, problem: str) -> LaunchError:
        return LaunchError(
            f"{self.launcher}'s environment: {problem}. To start local ranks instead, unset its variables"
        )

    def text(self, *names: str) -> tuple[str, str]:
        """Name and value of the first variable that is set."""
        for name in names:
            if value := self.environ.get(name):
                return name, value
        raise self.error(f"{' or '.join(names)} is not set")

    def number(self, *names: str, default: int | None = None, low: int = 0, high: int | None = None) -> int:
        """The whole number in the first variable that is set, within [low, high)."""
        if default is not None and not any(self.environ.get(name) for name in names):
            return default
        name, value = self.text(*names)
        if not re.fullmatch(r"\d{1,10}", value.strip()):
            raise self.error(f"{name}={value} is not a whole number")
        number = int(value)
        if number < low:
            raise self.error(f"{name}={value} is less than {low}")
        if high is not None and number >= high:
            raise self.error(f"{name}={value} is not less than the number of ranks, {high}")
        return number

    def port(self, *names: str) -> int:
        number = self.number(*names, low=1)
        if number > 65535:
            raise self.error(f"{names[0]}={number} is not a port (1-65535)")
        return number

    def joined(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
        init_method: str,
        *,
        counted: bool,
    ) -> Joined:
        """`counted`: whether the launcher has said how many ranks are on this host."""
        if local_rank >= local_world_size or local_world_size > world_size:
            raise self.error(
                f"local rank {local_rank} of {local_world_size} local ranks of {world_size} ranks makes no sense"
            )
        one_host = counted and local_world_size == world_size
        return Joined(self.launcher, rank, world_size, local_rank, local_world_size, init_method, one_host)


def _torchrun(variables: _Variables) -> Joined:
    world_size = variables.number("WORLD_SIZE", low=1)
    variables.port("MASTER_PORT")
    return variables.joined(
        rank=variables.number("RANK", high=world_size),
        world_size=world_size,
        local_rank=variables.number("LOCAL_RANK", high=world_size),
        local_world_size=variables.number("LOCAL_WORLD_SIZE", default=world_size, low=1),
        init_method="env://",
        counted="LOCAL_WORLD_SIZE" in variables.environ,
    )


def _srun(variables: _Variables) -> Joined | None:
    environ = variables.environ
    if variables.number("SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    world_size = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", low=1)
    if world_size == 1 and environ.get("SLURM_PTY_PORT"):
        return None  # `srun --pty bash`: a person's shell
    node = variables.number("SLURM_NODEID", default=0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    per_node = expand_tasks(tasks) if tasks else [world_size]
    if per_node is None:
        raise variables.error(f"SLURM_STEP_TASKS_PER_NODE={tasks} cannot be read")
    if node >= len(per_node):
        raise variables.error(f"SLURM_NODEID={node} is not one of the {len(per_node)} nodes of {tasks}")
    host = environ.get("MASTER_ADDR")
    if not host:
        name, nodes = variables.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
        host = first_host(nodes)
        if not host:
            raise variables.error(f"{name}={nodes} names no host")
    if environ.get("MASTER_PORT"):
        port = variables.port("MASTER_PORT")
    else:
        # the same on all ranks, other for every step, below the range from which systems take ports themselves
        job = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
        port = 15000 + (job * 31 + variables.number("SLURM_STEP_ID")) % 15000
    return variables.joined(
        rank=variables.number("SLURM_PROCID", high=world_size),
        world_size=world_size,
        local_rank=variables.number("SLURM_LOCALID", high=world_size),
        local_world_size=per_node[node],
        init_method=_tcp(host, port),
        counted=tasks is not None,
    )


def _msrun(variables: _Variables) -> Joined:
    world_size = variables.number("MS_WORKER_NUM", low=1)
    init_method = _tcp(variables.text("MS_SCHED_HOST")[1], variables.port("MS_SCHED_PORT"))
    role = variables.text("MS_ROLE")[1]
    if role == "MS_SCHED":
        return Joined("msrun", 0, world_size, 0, world_size, init_method, scheduler=True)
    if role != "MS_WORKER":
        raise variables.error(f"MS_ROLE={role} is neither MS_WORKER nor MS_SCHED")
    if not (variables.environ.get("MS_NODE_ID") or variables.environ.get("RANK_ID")):
        raise variables.error("MS_NODE_ID is not set: with more than one node, give msrun --node_rank")
    rank = variables.number("MS_NODE_ID", "RANK_ID", high=world_size)
    # msrun does not say how many of its ranks share a host
    return variables.joined(
        rank=rank,
        world_size=world_size,
        local_rank=variables.number("LOCAL_RANK", default=rank, high=world_size),
        local_world_size=variables.number("LOCAL_WORLD_SIZE", default=world_size, low=1),
        init_method=init_method,
        counted="LOCAL_WORLD_SIZE" in variables.environ,
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM list: "gpu[007-010,12],x" gives "gpu007"; "" if there is none."""
    match = re.match(r"\s*([^,\[\s]*)", nodes)
    host = match[1] if match else ""
    rest = nodes.strip()[len(host) :]
    while rest.startswith("["):
        inside, closed, rest = rest[1:].partition("]")
        first = re.match(r"\d+", inside)
        if not closed or not first:
            return ""
        suffix = re.match(r"[^,\[]*", rest)
        assert suffix is not None
        host += first[0] + suffix[0]
        rest = rest[suffix.end() :]
    return host


def expand_tasks(text: str) -> list[int] | None:
    """Tasks of every node: "4(x2),3" gives [4, 4, 3]; None if it cannot be read."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if not match:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"
