"""Whether a checkpoint fits the run that wants to go on from it; looked at before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcli.checkpoint.errors import CheckpointError
from hpcli.checkpoint.folder import CHECKPOINTS, find, read_state
from hpcli.config.validate import ResolvedConfig
from hpcli.models.description import describe_model

_EXPECTED_TO_CHANGE = ("launch", "logging", "checkpoint", "device", "device_options")
_SAID_BY_THE_MESH = "parallelism"


class Resume(NamedTuple):
    """A checkpoint to go on from.

    Attributes:
        step: the last step that it has seen.
        notices: what differs from the run that wrote it, one line each.
    """

    checkpoint: Path
    step: int
    notices: list[str]

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run that wrote it; None where it does not lie in one."""
        directory = self.checkpoint.absolute().parent
        return directory.parent if directory.name == CHECKPOINTS else None


def prepare_resume(path: Path, resolved: ResolvedConfig) -> Resume:
    """The newest complete checkpoint that ``path`` means, checked against the configuration.

    Raises:
        CheckpointError: none there, damaged, of another model, or already at the last step.
    """
    checkpoint = find(path)
    state = read_state(checkpoint)
    try:
        step, shapes, saved = int(state["step"]), dict(state["model"]), dict(state["config"])
        ranks, mesh = int(state["world_size"]), dict(state["mesh"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is damaged: its state lacks {error}") from error
    config = resolved.config
    here = {name: list(spec.shape) for name, spec in describe_model(config.model).items()}
    if difference := _model_difference(shapes, here):
        raise CheckpointError(f"{checkpoint} is of another model: {difference}")
    if saved.get("platform") != config.platform:
        raise CheckpointError(
            f"{checkpoint} was written by {saved.get('platform')}, and this run is on {config.platform}"
        )
    if saved.get("optimizer", {}).get("name") != config.optimizer.name:
        raise CheckpointError(
            f"{checkpoint} holds the state of {saved.get('optimizer', {}).get('name')}, and optimizer.name is "
            f"{config.optimizer.name}"
        )
    if step >= config.training.steps:
        raise CheckpointError(
            f"{checkpoint} is at step {step}, and training.steps is {config.training.steps}: nothing is left to do; "
            "raise it (--steps)"
        )
    notices = []
    new_mesh = resolved.mesh.degrees
    if (ranks, mesh) != (resolved.world_size, new_mesh):
        notices.append(
            f"layout changed: written by {ranks} ranks ({_written(mesh)}), read by {resolved.world_size} "
            f"({_written(new_mesh)}); the state is the same, the order of sums is not"
        )
    changes = list(_changes(saved, config.model_dump(mode="json"), ""))
    notices += [f"changed since the checkpoint: {change}" for change in changes]
    return Resume(checkpoint, step, notices)


def _model_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    for name, shape in here.items():
        if name not in there:
            return f"it has no parameter {name}"
        if list(there[name]) != shape:
            return f"its {name} is {tuple(there[name])}, this model's is {tuple(shape)}"
    extra = next((name for name in there if name not in here), None)
    return f"its parameter {extra} is not in this model" if extra else ""


def _changes(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in new:
            below = f"{path}.{key}" if path else str(key)
            if below in _EXPECTED_TO_CHANGE or below == _SAID_BY_THE_MESH or below == "training.steps":
                continue
            yield from _changes(old.get(key), new[key], below)
    elif old != new:
        yield f"{path} {old} -> {new}"


def _written(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())
