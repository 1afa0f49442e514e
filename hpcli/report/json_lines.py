"""Events as JSON: one object a line, strictly valid, floats that round-trip exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, TextIO

from hpcli.report.errors import cannot_write

Event = dict[str, Any]


def encode(event: Mapping[str, Any]) -> str:
    """One line of JSON, without the line feed.

    JSON has no NaN and no infinity: such a value becomes ``null``, and the record gains ``nonfinite``, which maps the
    path of each (``loss``, ``rows[3].global_norm``) to ``"nan"``, ``"inf"`` or ``"-inf"``.
    """
    nonfinite: dict[str, str] = {}
    record = _finite(event, "", nonfinite)
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False, default=_plain)


def _finite(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    if isinstance(value, float):
        if isfinite(value):
            return float(value)
        nonfinite[path] = str(float(value))
        return None
    if isinstance(value, Mapping):
        dot = "." if path else ""
        return {str(key): _finite(item, f"{path}{dot}{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{path}[{index}]", nonfinite) for index, item in enumerate(value)]
    return value


def _plain(value: object) -> object:
    """What json cannot write by itself (a path, a dtype) as its text."""
    return str(value)


class JsonLines:
    """Writes every event to a stream as one line of JSON, at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def handle(self, event: Event) -> None:
        try:
            self._stream.write(encode(event) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise cannot_write("to", "standard output", error) from error

    def close(self) -> None:
        """Nothing to do: the stream belongs to whoever opened it."""
