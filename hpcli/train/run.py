"""The parent's part of a training run: last checks, start the ranks or join them, report what they say."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcli.checkpoint.folder import CHECKPOINTS
from hpcli.checkpoint.resume import Resume
from hpcli.config.errors import ConfigError, Problem
from hpcli.config.validate import ResolvedConfig
from hpcli.data.documents import DataError, load_documents
from hpcli.launch import Joined, RankServer, detect_launcher, run_joined
from hpcli.models.description import describe_model, frozen_names
from hpcli.report.failures import signals_end_the_run
from hpcli.train.planted import planted_failure
from hpcli.train.precision import precision_policy

if TYPE_CHECKING:
    from hpcli.report.sink import Sink

TARGET = "hpcli.train.loop:run"


def train(
    resolved: ResolvedConfig, *, config_file: Path, output: Path, resume: Resume | None = None, json: bool, debug: bool
) -> int:
    """Train, and return the command's exit code: 0, or 1 where ranks hold different norms.

    A scheduler's SIGTERM ends the run after the step that it is in, with a checkpoint where the configuration asks for any.

    Raises:
        ConfigError: what only a look at the data and the model's parameters can show.
        LaunchError, RankFailure: ranks could not be started, or one failed.
        EndedBySignal: the run has ended because it was asked to.
        ReportError: metrics cannot be written.
    """
    check_contents(resolved)
    device = device_type(resolved.config.device)
    joined = detect_launcher(os.environ)
    if joined is not None:
        payload = _payload(resolved, device, config_file, output, resume)
        return _train_joined(joined, resolved, payload, output, resume, json=json)
    with signals_end_the_run() as signals, RankServer(device) as server:  # it warms up while the rest is made ready
        payload = _payload(resolved, device, config_file, output, resume)
        with _sink(resolved, output, resume, json=json) as sink:
            timeout = resolved.config.launch.timeout_seconds
            signals.ask_first(server.request_stop)
            server.run(TARGET, payload, resolved.world_size, timeout_seconds=timeout, on_event=sink.handle)
        signals.raise_if_asked()
    return 1 if sink.failed else 0


def _train_joined(
    joined: Joined, resolved: ResolvedConfig, payload: dict[str, Any], output: Path, resume: Resume | None, *, json: bool
) -> int:
    timeout = resolved.config.launch.timeout_seconds
    if joined.rank != 0 or joined.scheduler:
        run_joined(joined, TARGET, payload, timeout_seconds=timeout, on_event=lambda event: None)
        return 0
    with _sink(resolved, output, resume, json=json) as sink:
        run_joined(joined, TARGET, payload, timeout_seconds=timeout, on_event=sink.handle)
    return 1 if sink.failed else 0


def _sink(resolved: ResolvedConfig, output: Path, resume: Resume | None, *, json: bool) -> Sink:
    from hpcli.report.sink import make_sink

    config, step = resolved.config, resume.step if resume else None
    return make_sink(output, json=json, logging=config.logging, max_norm=config.training.max_norm, resumed_step=step)


def _payload(
    resolved: ResolvedConfig, device: str, config_file: Path, output: Path, resume: Resume | None
) -> dict[str, Any]:
    directory = resolved.config.checkpoint.directory
    start = _start(resolved, device, config_file, output)
    if resume is not None:
        start["notices"] = [*start["notices"], *resume.notices]
        start["resumed_from"] = str(resume.checkpoint)
    return {
        "checkpoints": str((output / CHECKPOINTS if directory is None else Path(directory).expanduser()).absolute()),
        "resume": None if resume is None else str(resume.checkpoint.absolute()),
        "config": resolved.config.model_dump(mode="json"),
        "mesh": asdict(resolved.mesh),
        "device": device,
        "start": start,
    }


def check_contents(resolved: ResolvedConfig) -> None:
    """What the values of a configuration cannot show by themselves: an unusable text, patterns that freeze nothing.

    Raises:
        ConfigError: with every problem found.
    """
    config, problems = resolved.config, []
    try:
        load_documents(config.data.path)
    except DataError as error:
        problems.append(Problem(resolved.file, None, None, "data.path", str(error)))
    names = list(describe_model(config.model))
    frozen, idle = frozen_names(names, config.model.freeze)
    for pattern in idle:
        message = f"{pattern!r} matches no parameter; there are {names[0]}, {names[1]}, ... {names[-1]}"
        problems.append(Problem(resolved.file, None, None, "model.freeze", message))
    if len(frozen) == len(names):
        problems.append(Problem(resolved.file, None, None, "model.freeze", "leaves no parameter to train"))
    try:
        planted_failure()
    except ValueError as error:
        problems.append(Problem("environment", None, None, "", str(error)))
    if problems:
        raise ConfigError(problems)


def device_type(device: str) -> str:
    """The device that ``auto`` stands for: the first kind of accelerator that this machine has, else the CPU."""
    if device != "auto":
        return device
    from hpcli.doctor import accelerator_count

    if not accelerator_count("auto"):
        return "cpu"
    from hyper_parallel.platform.torch.loading import import_torch

    import_torch()  # whose extensions may be broken
    import torch

    return "cuda" if torch.cuda.is_available() else "npu"


def _start(resolved: ResolvedConfig, device: str, config_file: Path, output: Path) -> dict[str, Any]:
    config, mesh = resolved.config, resolved.mesh
    training = config.training
    policy = precision_policy(config)
    return {
        "config_file": str(config_file),
        "output": str(output),
        "world_size": resolved.world_size,
        "steps": training.steps,
        "mesh": mesh.degrees,
        "platform": config.platform,
        "device": device,
        "dtypes": {
            "params": policy.params_dtype,
            "compute": policy.compute_dtype,
            "reduce": policy.resolved_reduce_dtype,
        },
        "model": config.model.preset,
        "tokens_per_step": training.global_batch_size * training.seq_length,
        "notices": resolved.notices,
        "versions": {package: _version(package) for package in ("hyper-parallel", config.platform)},
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
