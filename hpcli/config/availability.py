"""What parses and is checked, but cannot run yet. A feature that lands deletes its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpcli.config.schema import Config


class Unavailable(NamedTuple):
    """`asked` says whether a configuration wants it; `has` completes the message."""

    key: str
    asked: Callable[[Config], bool]
    has: str


NOT_YET: tuple[Unavailable, ...] = (
    Unavailable("platform", lambda c: c.platform == "mindspore", "which runs on torch"),
)
