"""metrics.jsonl: the record of a run that is always kept."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpcli.report.errors import cannot_write
from hpcli.report.json_lines import Event, encode

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends every event as one line of JSON, each complete on disk before the next step begins.

    Appending, so that a run which continues in the same folder keeps its past; each begins with a ``start`` record.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
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


def _is_cut_off(path: Path) -> bool:
    """Whether the last record lacks its line feed, because a full disk or a power cut took it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"
