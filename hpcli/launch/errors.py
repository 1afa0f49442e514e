"""What the launcher raises. Every message is finished text for the terminal."""

from __future__ import annotations


class LaunchError(Exception):
    """Ranks could not be started or joined; `details` holds what `--debug` shows in addition."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class RankFailure(LaunchError):
    """A rank raised, left, was ended by a signal or hung.

    `rank` is the rank named as the cause and `step` the step it was in (0: before the first one).
    """

    def __init__(self, message: str, *, rank: int, step: int, details: str = "") -> None:
        super().__init__(message, details)
        self.rank = rank
        self.step = step
