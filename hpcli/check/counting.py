"""Counts the collectives that some code issues."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_COLLECTIVES = ("wait_tensor", "barrier")


class CollectiveCounter(TorchDispatchMode):
    """``total`` is how many collectives were issued inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace in _NAMESPACES and function._opname not in _NO_COLLECTIVES:
            self.total += 1
        return function(*arguments, **(options or {}))
