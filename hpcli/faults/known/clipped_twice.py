"""A parameter that is listed twice is scaled twice."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="gradients scaled once for every time that they are listed",
    source="torch 2.13, measured",
    rule="every gradient is scaled once, however often it is listed",
    layout="fsdp{ranks}",
    cause="clipped-twice",
    wrong="gradient (20, 20) listed twice, max_norm 1: its norm becomes 0.01768 (and is returned as 40)",
    right="1 (and 28.2843)",
    why="28.2843 / 40 / 40 = 0.01768",
)


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm.arrangement import Arrangement

    scale = Arrangement.scale

    def for_each_mention(self: Arrangement, *arguments: Any, **options: Any) -> None:
        scale(self, *arguments, **options)
        scale(self, *arguments, **options)

    replace(Arrangement, "scale", for_each_mention)
