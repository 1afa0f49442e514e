"""The ranks' norms are averaged."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="the ranks' norms averaged",
    source="DeepSpeed#8475",
    rule="norms combine as the p-th root of the sum of their p-th powers",
    layout="fsdp{ranks}",
    cause="average-of-norms",
    wrong="two ranks with squares 20 and 100: (sqrt(20) + sqrt(100)) / 2 = 7.236068",
    right="sqrt(120) = 10.954452",
    why="squares add up, norms do not",
)


def patch() -> None:
    from hyper_parallel.core import norm_exchange

    def average(norms: Any, p: float) -> float:
        values = list(norms)
        return math.fsum(values) / len(values)

    replace(norm_exchange, "combine", average)
