"""Write a configuration to `x.yaml` in a directory of its own, and load it or read its problems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcli.config import ConfigError, LoadedConfig, Override, ResolvedConfig, load_config, resolve_config


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def load() -> Callable[..., LoadedConfig]:
    def run(text: str | bytes, *overrides: str | Override) -> LoadedConfig:
        Path("x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(Path("x.yaml"), overrides)

    return run


@pytest.fixture
def resolve(load: Callable[..., LoadedConfig]) -> Callable[..., ResolvedConfig]:
    def run(
        text: str | bytes, *overrides: str | Override, ranks: int | None = None, **given: int
    ) -> ResolvedConfig:
        return resolve_config(load(text, *overrides), ranks=ranks, **given)

    return run


@pytest.fixture
def problems(resolve: Callable[..., ResolvedConfig]) -> Callable[..., list[str]]:
    """The lines of the error that a configuration ends in."""

    def run(
        text: str | bytes, *overrides: str | Override, ranks: int | None = None, **given: int
    ) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            resolve(text, *overrides, ranks=ranks, **given)
        return str(caught.value).splitlines()

    return run


@pytest.fixture
def problem(problems: Callable[..., list[str]]) -> Callable[..., str]:
    """The one line of the error that a configuration ends in."""

    def run(*args: str | bytes, **given: int) -> str:
        (line,) = problems(*args, **given)
        return line

    return run
