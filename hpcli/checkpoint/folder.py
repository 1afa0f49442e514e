"""Checkpoints on disk, without any framework: which are complete, how one becomes complete, which are deleted.

A checkpoint is a folder ``step-00000020`` with the tensors in safetensors files and everything else in ``state.json``. It is
written under a name that begins with a dot, and gets its own name by one rename when all is on disk: what has a
checkpoint's name is complete, whenever the run was killed. Deleting goes the same way back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcli.checkpoint.errors import CheckpointError

FORMAT = 1
STATE_FILE = "state.json"
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints, in the run's folder
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.(writing|deleting)-step-\d{8,}")


def begin(directory: Path, step: int) -> Path:
    """An empty folder for the files of the checkpoint of ``step``; not a checkpoint until :func:`publish`.

    Raises:
        CheckpointError: it cannot be made.
    """
    folder = directory / f".writing-{_name(step)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if folder.exists():  # an earlier run was killed while it wrote
            shutil.rmtree(folder)
        folder.mkdir()
    except OSError as error:
        raise cannot("write a checkpoint into", directory, error) from error
    return folder


def publish(folder: Path, state: Mapping[str, Any]) -> Path:
    """Make the files in ``folder`` a checkpoint: add ``state``, bring all to disk, rename. Returns its path.

    Raises:
        CheckpointError: it could not be written; an older checkpoint of the same step is still there.
    """
    final = folder.with_name(_name(state["step"]))
    replaced = folder.with_name(f".deleting-{final.name}")
    try:
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        text = json.dumps({"format": FORMAT, **state, "files": files}, indent=1)
        (folder / STATE_FILE).write_text(text, encoding="utf-8")
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)
        if final.exists():  # a resumed run comes past the same step again
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        folder.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise cannot("write a checkpoint into", folder.parent, error) from error
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def discard(folder: Path) -> None:
    """Remove what :func:`begin` made, after a failure. Never raises."""
    shutil.rmtree(folder, ignore_errors=True)


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what killed runs left unfinished.

    What cannot be deleted stays: a full list of checkpoints is no reason to end a run.
    """
    for old in complete(directory)[:-keep]:
        hidden = old.with_name(f".deleting-{old.name}")
        with suppress(OSError):
            old.rename(hidden)
            shutil.rmtree(hidden)
    with suppress(OSError):
        for path in directory.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in ``directory``, oldest first; none where it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / STATE_FILE).exists()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise cannot("read the checkpoints in", directory, error) from error
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def find(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest in it, in its ``checkpoints`` folder.

    Raises:
        CheckpointError: there is none.
    """
    if not path.exists():
        raise CheckpointError(f"there is no {path}: give a checkpoint, or the folder of a run")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a checkpoint's folder, or the folder of a run")
    if (path / STATE_FILE).exists():
        return path
    for directory in (path, path / CHECKPOINTS):
        if found := complete(directory):
            return found[-1]
    raise CheckpointError(f"{path} holds no complete checkpoint (looked for step-*/{STATE_FILE}, also in {CHECKPOINTS}/)")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The ``state.json`` of a checkpoint whose files are all there in their full size.

    Raises:
        CheckpointError: a file is missing, truncated or not understood.
    """
    path = checkpoint / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        version, files = state["format"], dict(state["files"])
    except OSError as error:
        raise cannot("read", path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint's state ({error or type(error).__name__})") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}; this version reads format {FORMAT}")
    for name, size in files.items():
        file = checkpoint / name
        try:
            held = file.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{checkpoint} is incomplete: {name} is missing") from None
        except OSError as error:
            raise cannot("read", file, error) from error
        if held != size:
            raise CheckpointError(f"{checkpoint} is damaged: {name} has {held} bytes, and {size} were written")
    return dict(state)


def cannot(what: str, where: Path, error: OSError) -> CheckpointError:
    """The one wording for what the file system refuses."""
    return CheckpointError(f"cannot {what} {where}: {error.strerror or error}")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
