"""Byte-level text cut into sequences, and the global batches made of them.

Every rank can tell the whole global batch from the step's number alone, so batches need no communication: neither their
content nor the number of valid tokens in them, by which the loss is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpcli.data.documents import DataError

IGNORED = -100
"""The label of a position that is not trained on (torch's ``ignore_index``)."""


class Batch(NamedTuple):
    """Sequences of one rank.

    Attributes:
        inputs: token ids, (sequences, tokens) int64.
        labels: (sequences, positions) int64, ``IGNORED`` where nothing is trained on. Where there are images, their positions
            come first.
        images: (sequences, height, width) float32 in [0, 1]; None for text alone.
    """

    inputs: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    images: npt.NDArray[np.float32] | None = None

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of ``size`` sequences, in order."""
        starts = range(0, len(self.inputs), size)
        return [self._rows(slice(start, start + size)) for start in starts]

    def _rows(self, rows: slice) -> Batch:
        images = None if self.images is None else self.images[rows]
        return Batch(self.inputs[rows], self.labels[rows], images)

    def model_inputs(self) -> tuple[npt.NDArray[Any], ...]:
        """What the model's forward takes: token ids, and images where there are any."""
        return (self.inputs,) if self.images is None else (self.inputs, self.images)


def joined(batches: Sequence[Batch]) -> Batch:
    """The sequences of all ``batches``, in order: the opposite of :meth:`Batch.split`."""
    images = [batch.images for batch in batches if batch.images is not None]
    return Batch(
        np.concatenate([batch.inputs for batch in batches]),
        np.concatenate([batch.labels for batch in batches]),
        np.concatenate(images) if images else None,
    )


class TextBatches:
    """Global batches of byte sequences.

    Each document is cut into sequences of at most ``seq_length`` predicted bytes; its last one is shorter and padded, so
    sequences differ in their number of valid tokens. Each epoch visits every sequence once, shuffled if asked.

    Raises:
        DataError: no sequence at all.
    """

    def __init__(self, documents: list[bytes], *, seq_length: int, batch_size: int, seed: int, shuffle: bool) -> None:
        pieces = [_cut(np.frombuffer(text, np.uint8), seq_length) for text in documents if len(text) > 1]
        if not pieces:
            raise DataError("the text has no two consecutive bytes to learn from")
        self.bytes = np.concatenate([rows for rows, _ in pieces])
        self.valid = np.concatenate([valid for _, valid in pieces])
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle

    def valid_tokens(self, step: int) -> int:
        """Predicted bytes in the global batch of ``step`` (1-based)."""
        return int(self.valid[self._rows(step)].sum())

    def share(self, step: int, index: int, shares: int) -> Batch:
        """Share ``index`` of ``shares`` equal, consecutive ones of the global batch of ``step`` (1-based)."""
        size = self.batch_size // shares
        rows = self._rows(step)[index * size : (index + 1) * size]
        text = self.bytes[rows].astype(np.int64)
        beyond = np.arange(text.shape[1] - 1) >= self.valid[rows][:, None]
        return Batch(text[:, :-1], np.where(beyond, IGNORED, text[:, 1:]))

    def _rows(self, step: int) -> npt.NDArray[np.int64]:
        positions = np.arange((step - 1) * self.batch_size, step * self.batch_size)
        epochs = positions // len(self.bytes)
        orders = {epoch: self._order(int(epoch)) for epoch in np.unique(epochs)}
        return np.array([orders[e][p % len(self.bytes)] for e, p in zip(epochs, positions, strict=True)], np.int64)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(len(self.bytes))
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.bytes))


def _cut(text: npt.NDArray[np.uint8], seq_length: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """A document as rows of ``seq_length`` + 1 bytes, each beginning with the last one of the row before, and how many bytes of
    each row are predicted. The last row is padded with zeros."""
    starts = np.arange(0, len(text) - 1, seq_length)
    padded = np.zeros(len(starts) * seq_length + 1, np.uint8)
    padded[: len(text)] = text
    rows = np.lib.stride_tricks.sliding_window_view(padded, seq_length + 1)[::seq_length]
    return rows, np.minimum(seq_length, len(text) - 1 - starts)
