"""Giving one cell a behaviour of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms


def extend(cell: ms.nn.Cell, mixin: type, attributes: Mapping[str, Any]) -> None:
    """Mix ``mixin``, whose ``construct`` calls the cell's own, into the class of this one ``cell``, in place.

    Hooks would do less: MindSpore 2.10 runs a cell's saved-tensor hooks only where ``set_grad`` was called on it.
    ``attributes`` are kept outside of MindSpore's account of parameters and cells.
    """
    cell.__dict__.update(attributes)
    cell.__class__ = type(f"{mixin.__name__.strip('_')}{type(cell).__name__}", (mixin, type(cell)), {})
