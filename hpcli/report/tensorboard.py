"""TensorBoard event files, written with the ``tensorboard`` package alone.

torch.utils.tensorboard would import torch into the parent process, and tensorboard.summary.Writer writes from a thread,
where a full disk is noticed late or never; so the records are written here, in the format's own two parts: the protocol
buffers and the record framing.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcli.report.errors import ReportError, cannot_write
from hpcli.report.json_lines import Event

SCALARS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/clip_coefficient": "clip_coefficient",
    "train/learning_rate": "lr",
    "train/tokens_per_second": "tokens_per_second",
}


class TensorBoardFile:
    """One scalar series for each entry of ``SCALARS``.

    Raises:
        ReportError: the tensorboard package is missing, or its file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ReportError(
                f"logging.tensorboard is on but the tensorboard package cannot be imported ({error}); "
                "install it with: pip install 'hyper-parallel[tensorboard]'   (or run with --set logging.tensorboard=false)"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self.folder = folder
        self.path = (
            folder / f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
        except OSError as error:
            raise cannot_write("the TensorBoard events", self.path, error) from error
        self._records = RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def handle(self, event: Event) -> None:
        if event["event"] != "step":
            return
        values = [
            self._summary.Value(tag=tag, simple_value=float(event[key]))
            for tag, key in SCALARS.items()
            if event.get(key) is not None
        ]
        self._write(
            self._event(wall_time=time.time(), step=event["step"], summary=self._summary(value=values))
        )

    def _write(self, record: Any) -> None:
        try:
            self._records.write(record.SerializeToString())
            self._records.flush()
        except OSError as error:
            raise cannot_write("the TensorBoard events", self.path, error) from error

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
