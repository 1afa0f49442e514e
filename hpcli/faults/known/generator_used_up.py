"""The norm reads a generator of parameters to its end, and clipping finds nothing left."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="nothing clipped: the norm has used up the generator of parameters",
    source="torchtitan#1258",
    rule="an iterable of parameters is read once, into a list",
    layout="fsdp{ranks}",
    cause="not-clipped",
    wrong="gradient (3, 4), max_norm 1: 5 returned, and (3, 4) left as it is",
    right="(0.6, 0.8)",
    why="(3, 4) / 5",
)


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm.arrangement import Arrangement

    def nothing_left(self: Arrangement, locals_: Any, coefficient: float, *, foreach: bool = True) -> None:
        """All gradients were read before."""

    replace(Arrangement, "scale", nothing_left)
