"""Rank program: a program out of the README."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from unittest import mock

import torch.distributed as dist

import hyper_parallel


def printed(folder: str, name: str) -> list[str]:
    """The lines that the program ``name`` prints on this rank; it finds the process group started, and leaves it to others to end."""
    sys.path.insert(0, folder)
    output = io.StringIO()
    with (
        mock.patch.object(hyper_parallel, "init"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(output),
    ):
        runpy.run_path(f"{folder}/{name}", run_name="__main__")
    return output.getvalue().splitlines()
