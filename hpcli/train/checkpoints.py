"""Each rank's part in saving and resuming: when, and in which order, on every platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcli.checkpoint.errors import CheckpointError
from hpcli.checkpoint.folder import begin, discard, prune, publish, read_state
from hpcli.config.schema import Config
from hpcli.launch.context import RankContext
from hpcli.models.description import describe_model
from hpcli.train.engine import Engine
from hyper_parallel.core.mesh import ParallelMesh


class Checkpoints:
    """Saves ``engine`` into ``directory``. Every method is called by all ranks alike, and fails on all alike."""

    def __init__(
        self, context: RankContext, config: Config, mesh: ParallelMesh, engine: Engine, directory: Path
    ) -> None:
        self.context, self.config, self.mesh, self.engine = context, config, mesh, engine
        self.directory = directory

    @property
    def wanted(self) -> bool:
        """Whether the configuration asks for checkpoints."""
        return self.config.checkpoint.every > 0

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after ``step``; the last step gets one too."""
        every = self.config.checkpoint.every
        return self.wanted and (step % every == 0 or step == self.config.training.steps)

    def save(self, step: int) -> Path:
        """Write the checkpoint of ``step``, complete or not at all; then delete those that are too many.

        Raises:
            CheckpointError: some rank could not write. Older checkpoints are untouched.
        """
        first = self.context.rank == 0
        folder, error = self._on_first(lambda: begin(self.directory, step) if first else None)
        self._agree(error)
        folder = Path(self.engine.gather(str(folder))[0])
        try:
            if not folder.is_dir():
                raise CheckpointError(f"{folder} is not seen from {self.context.host}: ranks need one shared file system")
            extra = self.engine.save(folder)
        except CheckpointError as failure:
            error = failure
        except Exception:
            if first:
                discard(folder)
            raise
        if first and error is None:
            _, error = self._on_first(lambda: publish(folder, self._state(step, extra)))
        try:
            self._agree(error)
        except CheckpointError:
            if first:
                discard(folder)
            raise
        if first:
            prune(self.directory, self.config.checkpoint.keep)
        return folder.with_name(folder.name.removeprefix(".writing-"))

    def load(self, checkpoint: Path) -> int:
        """Take over the state of ``checkpoint``; returns the step that it has seen.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        state, error = self._on_first(lambda: read_state(checkpoint))
        self._agree(error)
        self.engine.load(checkpoint, state["engine"])
        return int(state["step"])

    def _state(self, step: int, extra: dict[str, Any]) -> dict[str, Any]:
        """What is not a tensor. The data's position is the step: batches follow from it and the seed alone."""
        return {
            "step": step,
            "config": self.config.model_dump(mode="json"),
            "world_size": self.context.world_size,
            "mesh": self.mesh.degrees,
            "model": {name: list(spec.shape) for name, spec in describe_model(self.config.model).items()},
            "engine": extra,
        }

    def _on_first(self, action: Any) -> tuple[Any, CheckpointError | None]:
        try:
            return action(), None
        except CheckpointError as error:
            return None, error

    def _agree(self, error: CheckpointError | None) -> None:
        messages = self.engine.gather(None if error is None else str(error))
        failed = next((text for text in messages if text is not None), None)
        if failed is not None:
            raise CheckpointError(failed) from error
