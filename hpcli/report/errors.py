"""What goes wrong while reporting."""

from __future__ import annotations

from os import PathLike


class ReportError(Exception):
    """A report could not be written. ``str(error)`` is the whole message for the terminal."""


def cannot_write(what: str, where: str | PathLike[str], error: OSError) -> ReportError:
    """The one wording for a failed write: what it was, where it should have gone, why it did not."""
    reason = error.strerror or str(error) or type(error).__name__
    return ReportError(f"cannot write {what} {where}: {reason}")
