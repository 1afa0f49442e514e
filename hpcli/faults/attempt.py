"""What a call gives or raises, as data."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

_LONGEST_MESSAGE = 2000


def attempt(function: Callable[[], Any]) -> Any:
    """What ``function`` returns; or the exception that it raises, as ``raised``, ``message``, and the functions that it came
    ``through``, outermost first, each with file, line and name."""
    try:
        return as_data(function())
    except Exception as error:  # noqa: BLE001 (an exception is what many faults are)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        return {
            "raised": type(error).__name__,
            "message": str(error)[:_LONGEST_MESSAGE],
            "through": [[frame.filename, frame.lineno, frame.name] for frame in frames],
        }


def attempts(functions: Mapping[str, Callable[[], Mapping[str, Any]]]) -> dict[str, Any]:
    """:func:`attempt` for each; what one returns is flat in the result, "NAME: KEY" for each of its keys."""
    told: dict[str, Any] = {}
    for name, function in functions.items():
        value = attempt(function)
        told |= {name: value} if is_raised(value) else {f"{name}: {key}": entry for key, entry in value.items()}
    return told


def is_raised(value: Any) -> bool:
    """Whether ``value`` is an exception as :func:`attempt` gives it."""
    return isinstance(value, dict) and set(value) == {"raised", "message", "through"}


def as_data(value: Any) -> Any:
    """Tensors as numbers, whatever they are in."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_data(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(entry) for entry in value]
    return value
