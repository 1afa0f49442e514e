"""What goes wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be written or used. ``str(error)`` is the whole message for the terminal."""
