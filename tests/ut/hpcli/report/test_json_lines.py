from __future__ import annotations

import errno
import io
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcli.report.errors import ReportError
from hpcli.report.json_lines import JsonLines, encode


def strict(line: str) -> Any:
    """Parse JSON, refusing the NaN and Infinity that Python's parser would let pass."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_nonfinite_values_become_null_and_are_named() -> None:
    record = strict(encode({"event": "step", "loss": math.nan, "rows": [{"norm": 1.0}, {"norm": -math.inf}]}))
    assert record["loss"] is None
    assert record["rows"] == [{"norm": 1.0}, {"norm": None}]
    assert record["nonfinite"] == {"loss": "nan", "rows[1].norm": "-inf"}


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 0.776062011718750])
def test_floats_survive_the_round_trip(value: float) -> None:
    again = strict(encode({"x": value}))["x"]
    assert again.hex() == value.hex()


def test_a_line_is_one_line_whatever_the_text() -> None:
    text = encode({"path": Path("a\nb"), "text": "x\u2028\x1b[31m\ud800"})
    assert text.isascii() and text.isprintable()
    assert strict(text)["path"] == "a\nb"


def test_every_event_is_one_object_on_one_line(events: SimpleNamespace) -> None:
    stream = io.StringIO()
    lines = JsonLines(stream)
    for event in events.whole_run(norm=math.nan):
        lines.handle(event)
    assert [strict(line)["event"] for line in stream.getvalue().splitlines()] == [
        "start", "step", "step", "step", "step", "norm_table", "end",
    ]  # fmt: skip


def test_a_full_disk_behind_standard_output_is_one_clear_error(events: SimpleNamespace) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ReportError, match="cannot write to standard output: No space left on device"):
        JsonLines(Full()).handle(events.step(1))


def test_a_closed_pipe_is_left_to_the_caller(events: SimpleNamespace) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        JsonLines(Closed()).handle(events.step(1))
