"""The batch that check-norm trains on: ranks and micro-batches have unequal numbers of valid tokens."""

from __future__ import annotations

from hpcli.config.schema import Config
from hpcli.data.batches import Batches
from hpcli.data.documents import load_documents
from hpcli.data.images import ImageTextBatches
from hpcli.data.text import TextBatches


def check_batches(config: Config) -> Batches:
    """Short documents of every length, so that a mean over ranks or micro-batches is never the mean over tokens."""
    training = config.training
    text = b"".join(load_documents(None))  # long enough that no two sequences are the same
    lengths = [2 + (7 * number) % training.seq_length for number in range(4 * training.global_batch_size)]
    starts = [101 * number for number in range(len(lengths))]
    documents = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    batches = TextBatches(
        documents,
        seq_length=training.seq_length,
        batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=True,
    )
    return ImageTextBatches(batches, config.model) if config.model.kind == "vlm" else batches
