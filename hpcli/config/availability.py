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


_DTYPES = "which computes in float32 and bfloat16"

NOT_YET: tuple[Unavailable, ...] = (
    Unavailable("platform", lambda c: c.platform == "mindspore", "which runs on torch"),
    Unavailable("training.compute_dtype", lambda c: c.training.compute_dtype == "float16", _DTYPES),
    Unavailable("training.loss_scale", lambda c: c.training.loss_scale is not None, _DTYPES),
)
