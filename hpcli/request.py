"""From the options of a command to a configuration that is ready to run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpcli.config.overrides import Override
    from hpcli.config.validate import ResolvedConfig


def overrides_of(
    settings: Sequence[str] | None,
    steps: int | None,
    offload: bool | None,
    fp32: bool | None,
    device: str | None,
) -> list[Override]:
    """What the options change in the file, each labelled as the user typed it.

    An option of its own comes after every ``--set``, and so wins over it.
    """
    from hpcli.config.overrides import Override

    overrides = [Override(setting) for setting in settings or ()]
    if steps is not None:
        overrides.append(Override(f"training.steps={steps}", f"--steps {steps}"))
    for key, name, value in (
        ("fsdp_config.enable_offload", "enable-offload", offload),
        ("training.accumulate_allreduce_grads_in_fp32", "accumulate-allreduce-grads-in-fp32", fp32),
    ):
        if value is not None:
            overrides.append(
                Override(f"{key}={str(value).lower()}", f"--{name}" if value else f"--no-{name}")
            )
    if device is not None:
        overrides.append(Override(f"device={device}", f"--device {device}"))
    return overrides


def resolve(
    config: Path, ranks: int | None, overrides: list[Override], *, elsewhere: bool = False
) -> tuple[ResolvedConfig, bool]:
    """The configuration, ready to run, and whether this process is the one that reports: alone, or rank 0.

    Under a launcher every rank comes here; all but the first end silently if the request is wrong.

    Args:
        elsewhere: it would run on another machine: this one's devices do not matter.
    """
    from hpcli.config.errors import ConfigError
    from hpcli.config.load import load_config
    from hpcli.config.validate import resolve_config
    from hpcli.doctor import accelerator_count
    from hpcli.launch.environment import detect_launcher

    joined = detect_launcher(os.environ)
    is_first = joined is None or (joined.rank == 0 and not joined.scheduler)
    try:
        loaded = load_config(config, overrides)
        resolved = resolve_config(
            loaded,
            ranks=ranks,
            launcher_world_size=None if joined is None else joined.world_size,
            device_count=None if elsewhere else accelerator_count(loaded.config.device),
        )
    except ConfigError as error:
        if is_first:
            raise
        raise typer.Exit(2) from error
    return resolved, is_first
