"""The batches of a run, by what its model learns from."""

from __future__ import annotations

from typing import Protocol

from hpcli.config.schema import Config
from hpcli.data.documents import load_documents
from hpcli.data.text import Batch, TextBatches


class Batches(Protocol):
    """Global batches that every rank can tell from the step's number alone."""

    def valid_tokens(self, step: int) -> int:
        """Positions that are trained on in the global batch of ``step`` (1-based)."""

    def share(self, step: int, index: int, shares: int) -> Batch:
        """Share ``index`` of ``shares`` equal, consecutive ones of the global batch of ``step``."""


def make_batches(config: Config) -> Batches:
    """The global batches of ``config``.

    Raises:
        DataError: the text gives no sequence.
    """
    training = config.training
    text = TextBatches(
        load_documents(config.data.path),
        seq_length=training.seq_length,
        batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=config.data.shuffle,
    )
    if config.model.kind != "vlm":
        return text
    from hpcli.data.images import ImageTextBatches

    return ImageTextBatches(text, config.model)
