"""What the training loop needs of a platform, and what a step gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hpcli.data.text import Batch

TOLD = ("loss", "stop")
"""What each rank tells all others in every step, a float64 each: its share of the loss, and whether it was asked to stop."""


class StepResult(NamedTuple):
    """One optimizer step.

    Attributes:
        loss: sum of token cross entropies over the number of valid tokens of the global batch; the same on every rank.
        grad_norm: global norm before clipping, as this rank holds it.
        clip_coefficient: by what the gradients were multiplied.
        skip_reason: why the weights were left as they were; None if they were not.
        stop: some rank has been asked to end the run early.
        loss_scale: what the loss was multiplied by; None without loss scaling.
    """

    loss: float
    grad_norm: float
    clip_coefficient: float
    skip_reason: str | None
    stop: bool = False
    loss_scale: float | None = None


class Engine(Protocol):
    """A model on its ranks, ready to train. Every method is called by all ranks alike."""

    parameter_count: int

    def step(
        self,
        micro_batches: Sequence[Batch],
        valid_tokens: int,
        lr: float,
        progress: Callable[[str], None],
        stop: bool = False,
    ) -> StepResult:
        """One optimizer step on this rank's share of the global batch; ``progress`` is told the phase. ``stop``: this rank has
        been asked to end early, which the others learn with the loss."""

    def plant_overflow(self) -> None:
        """Make a gradient of this rank infinite in the next step."""

    def rank_row(self) -> dict[str, Any]:
        """This rank's row of the norm table for the last step."""

    def gather(self, mine: Any) -> list[Any]:
        """``mine`` of every rank, in rank order."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write this rank's tensors into ``folder``, which is there; returns what else :meth:`load` needs, as JSON has it.

        Raises:
            CheckpointError: some rank could not write; on every rank alike.
        """

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Take over what :meth:`save` wrote, whatever layout wrote it; ``state`` is what it returned.

        Raises:
            CheckpointError: something is missing or damaged; on every rank alike.
        """

    def close(self) -> None:
        """Leave the process group."""
