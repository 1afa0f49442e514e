"""One set of rank servers for all entries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcli.repro.run import Stage

PROGRAMS = Path(__file__).parents[1] / "rank_programs"


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))  # the servers copy sys.path, so the ranks find what breaks the library
        with Stage() as stage:
            yield stage
