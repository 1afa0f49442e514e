"""From a command to the end of its first step on 8 CPU ranks: ``hpcli train`` beside the same model under torchrun.

Each run is a fresh command, as a user types it, the two kinds in turns. The clock runs from the start of the command to the
line that reports step 1; memory is read at that moment from outside, while the ranks go on with the next steps.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.results import Result, progress, seconds
from hpcli.launch import RankServer

RANKS, STEPS, REPETITIONS = 8, 25, 3
SCRIPT = Path(__file__).with_name("torchrun_script.py")
CONFIG = """\
model: {preset: decoder-tiny}
training: {steps: %d, global_batch_size: 8, seq_length: 64}
parallelism: {data_parallel_shard: -1}
launch: {ranks: %d}
logging: {plot: false}
"""


class Started(NamedTuple):
    """Seconds to the end of step 1, and the ranks' mean proportional memory then, in MB."""

    seconds: float
    megabytes: float
    parameters: int


def measure() -> list[Result]:
    hpcli_runs, torchrun_runs = [], []
    with tempfile.TemporaryDirectory(prefix="hpcli-bench-") as folder:
        config = Path(folder) / "tiny.yaml"
        config.write_text(CONFIG % (STEPS, RANKS))
        for number in range(1, REPETITIONS + 1):
            progress(f"start: {number} of {REPETITIONS}, torchrun")
            torchrun_runs.append(_torchrun())
            progress(f"start: {number} of {REPETITIONS}, hpcli train")
            hpcli_runs.append(_hpcli_train(config, Path(folder) / f"run-{number}"))
        progress("start: a second set of ranks")
        second = _second_set(config)
    if hpcli_runs[0].parameters != torchrun_runs[0].parameters:
        raise AssertionError("the two commands train different models")
    ours, theirs = (statistics.median(run.seconds for run in runs) for runs in (hpcli_runs, torchrun_runs))
    ours_mb, theirs_mb = (statistics.median(run.megabytes for run in runs) for runs in (hpcli_runs, torchrun_runs))
    return [
        Result("start", f"to the end of step 1, {RANKS} ranks", seconds(ours), f"torchrun {seconds(theirs)}", theirs / ours, "x", 4.0),
        Result("start", "memory of a rank (PSS)", f"{ours_mb:.0f} MB", f"torchrun {theirs_mb:.0f} MB", ours_mb, "MB", 60.0, False),
        Result("start", "a second set of ranks, to step 1", seconds(second), "", second, "s", 1.0, False),
    ]


def _torchrun() -> Started:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(port)]
    pattern = re.compile(r"step 1 .* parameters (\d+)")

    def first_step(line: str, _: dict[str, Any]) -> int | None:
        found = pattern.match(line)
        return int(found[1]) if found else None

    return _until_first_step([*launcher, str(SCRIPT), str(STEPS)], first_step, lambda _: True)


def _hpcli_train(config: Path, output: Path) -> Started:
    def first_step(line: str, seen: dict[str, Any]) -> int | None:
        event = json.loads(line)
        if event.get("event") == "start":
            seen["parameters"] = event["parameters"]
        return seen["parameters"] if event.get("event") == "step" else None

    def is_rank(process: int) -> bool:
        return Path(f"/proc/{process}/comm").read_text().startswith("hpcli:rank")

    command = ["-m", "hpcli", "train", str(config), "--json", "--output", str(output)]
    return _until_first_step(command, first_step, is_rank)


def _until_first_step(
    arguments: list[str], first_step: Callable[[str, dict[str, Any]], int | None], is_rank: Callable[[int], bool]
) -> Started:
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        command = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        assert command.stdout is not None
        seen: dict[str, Any] = {}
        try:
            for line in command.stdout:
                parameters = first_step(line, seen)
                if parameters:
                    took = time.perf_counter() - began
                    ranks = [process for process in _descendants(command.pid) if is_rank(process)]
                    memory = [_proportional_megabytes(process) for process in ranks]
                    break
            else:
                errors.seek(0)
                raise RuntimeError(f"{' '.join(arguments)} ended before its first step:\n{errors.read()[-4000:]}")
        finally:
            # the rest of the run is of no interest; torchrun and hpcli both end their ranks when they are asked to
            command.send_signal(signal.SIGTERM)
            command.communicate()
    if len(memory) != RANKS:
        raise RuntimeError(f"found {len(memory)} ranks of {RANKS}")
    return Started(took, statistics.mean(memory), parameters)


def _descendants(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [pid for child in map(int, children) for pid in (child, *_descendants(child))]


def _proportional_megabytes(process: int) -> float:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def _second_set(config_file: Path) -> float:
    """Seconds from asking a server that has run one set of ranks for another, to the end of that one's first step."""
    from dataclasses import asdict

    from hpcli.config.load import load_config
    from hpcli.config.validate import resolve_config

    resolved = resolve_config(load_config(config_file, ["training.steps=1", "device=cpu"]), ranks=RANKS)
    payload = {
        "config": resolved.config.model_dump(mode="json"),
        "mesh": asdict(resolved.mesh),
        "device": "cpu",
        "start": {},
        "checkpoints": "",
        "resume": None,
    }
    steps: list[float] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            steps.append(time.perf_counter())

    took = []
    with RankServer() as server:
        for number in range(REPETITIONS + 1):
            began = time.perf_counter()
            server.run("hpcli.train.loop:run", payload, RANKS, timeout_seconds=120, on_event=on_event)
            if number:  # the first also waits for the server
                took.append(steps[-1] - began)
    return statistics.median(took)
