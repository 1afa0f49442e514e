"""Plans of small configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcli.config.load import load_config
from hpcli.config.validate import ResolvedConfig, resolve_config

Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def resolve(tmp_path: Path) -> Resolve:
    """``resolve(ranks, section={...})``: the configuration with these sections, on the CPU unless told otherwise."""

    def resolved(ranks: int | None = None, **sections: Any) -> ResolvedConfig:
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump({"device": "cpu", **sections}))
        return resolve_config(load_config(path, []), ranks=ranks)

    return resolved
