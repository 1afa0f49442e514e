"""How much crosses between host and device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Copies(NamedTuple):
    """Copies between host and device since the process began, each a tensor."""

    to_device: int
    to_host: int
    bytes_to_device: int
    bytes_to_host: int

    def since(self, earlier: Copies) -> Copies:
        """What was copied between two looks at :func:`copies`."""
        return Copies(*(now - then for now, then in zip(self, earlier, strict=True)))


_counted = [0, 0, 0, 0]


def copies() -> Copies:
    """How many tensors have been copied between host and device so far. Reading a single number (``.item()``) is no copy."""
    return Copies(*_counted)


def count_copy(tensor: torch.Tensor, *, to_host: bool) -> None:
    """Note that the elements of ``tensor`` cross between host and device."""
    _counted[to_host] += 1
    _counted[2 + to_host] += tensor.numel() * tensor.element_size()
