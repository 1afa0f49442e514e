"""Where a run puts its files."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from hpcli.report.errors import cannot_write

RUNS = Path("runs")


def run_folder(config_file: Path, wanted: Path | None, *, create: bool = True) -> Path:
    """The folder of a run: ``wanted``, or else ``runs/<config>-<date>-<time>``, which no other run shares.

    With ``create``, the folder exists on return, so call this only once the request is known to be right. A ``wanted``
    folder may already exist.

    Raises:
        ReportError: it cannot be created.
    """
    now = datetime.now()
    folder = RUNS / f"{config_file.stem}-{now:%Y%m%d-%H%M%S}" if wanted is None else wanted
    if not create:
        return folder
    try:
        if wanted is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        RUNS.mkdir(exist_ok=True)
        # Creating is what reserves the name: of two runs that start in the same second, one gets the next number.
        for number in count(2):
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                folder = RUNS / f"{config_file.stem}-{now:%Y%m%d-%H%M%S}-{number}"
    except OSError as error:
        raise cannot_write("to the output folder", folder, error) from error
    raise AssertionError("count() ends never")


def remove_if_unused(folder: Path, wanted: Path | None) -> None:
    """Take back a folder that ``run_folder`` made for a run that then could not begin; one the user named stays."""
    if wanted is None:
        with suppress(OSError):
            folder.rmdir()
