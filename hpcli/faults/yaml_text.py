"""Configurations given as text, for faults that lie in one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hpcli.config.errors import ConfigError
from hpcli.config.load import load_config
from hpcli.config.schema import Config
from hpcli.config.validate import resolve_config


def read(text: str) -> Config:
    """The configuration that ``text`` is.

    Raises:
        ConfigError: with all of its problems.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.yaml"
        path.write_text(text)
        return load_config(path).config


def problems_of(text: str, ranks: int | None = None) -> str:
    """What ``hpcli train`` says about a file with that text before it starts anything, or "all is well"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.yaml"
        path.write_text(text)
        try:
            resolve_config(load_config(path), ranks=ranks)
        except ConfigError as error:
            return str(error).replace(f"{folder}/", "")
    return "all is well"
