"""The text that is trained on. No NumPy, so that a file is checked before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """The text cannot be trained on; the message says why."""


def load_documents(path: str | None) -> list[bytes]:
    """The documents of a text file (one), or of the built-in text: the reference prose that CPython carries for ``help()``.

    Raises:
        DataError: the file cannot be read or is empty.
    """
    if path is None:
        from pydoc_data.topics import topics

        return [topics[name].encode() for name in sorted(topics)]
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if len(text) < 2:
        raise DataError(f"{path} has {len(text)} bytes; at least 2 are needed to predict one from another")
    return [text]
