"""metrics.jsonl: the record of a run that is always kept."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcli.report.errors import cannot_write
from hpcli.report.json_lines import Event, encode

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends every event as one line of JSON, each complete on disk before the next step begins.

    Appending, so that a run which continues in the same folder keeps its past; each begins with a ``start`` record. A run that
    resumes after ``resumed_step`` first takes back what was recorded of later steps, which it computes again.

    Attributes:
        past: the ``step`` records that were kept.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        self.path = folder / FILE_NAME
        self.past: list[Event] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resumed_step is not None and self.path.exists():
                self.past = _take_back(self.path, resumed_step)
            cut_off = _is_cut_off(self.path)
            self._file = self.path.open("a", buffering=1, encoding="utf-8")
            if cut_off:
                self._file.write("\n")
        except OSError as error:
            raise cannot_write("the metrics", self.path, error) from error

    def handle(self, event: Event) -> None:
        try:
            self._file.write(encode(event) + "\n")
        except OSError as error:
            raise cannot_write("the metrics", self.path, error) from error

    def close(self) -> None:
        # What a full disk refused has been reported when it was written.
        with suppress(OSError):
            self._file.close()


def _take_back(path: Path, step: int) -> list[Event]:
    """Leave in ``path`` what was recorded up to ``step``, whole or not at all; the ``step`` records among it."""
    kept, past = [], []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        record = _record(line)
        if record is None or record.get("event") in ("end", "stopped") or record.get("step", 0) > step:
            continue
        kept.append(line)
        if record.get("event") == "step":
            past.append(record)
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
    return past


def _record(line: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and line.endswith("\n"):
            return record
    return None  # cut off by a kill


def _is_cut_off(path: Path) -> bool:
    """Whether the last record lacks its line feed, because a full disk or a power cut took it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"
