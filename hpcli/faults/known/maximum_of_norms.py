"""The largest of the ranks' norms is taken."""

from __future__ import annotations

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="the largest of the ranks' norms taken",
    source="DeepSpeed#1252",
    rule="norms combine as the p-th root of the sum of their p-th powers; the maximum is for p = inf alone",
    layout="fsdp{ranks}",
    cause="maximum-of-norms",
    wrong="4 ranks with gradients 1..8, two each: 10.6301",
    right="14.2829",
    why="sqrt(1 + 4 + ... + 64) = sqrt(204) = 14.2829, the last rank's sqrt(49 + 64) = 10.6301",
)


def patch() -> None:
    from hyper_parallel.core import norm_exchange

    replace(norm_exchange, "combine", lambda norms, p: max(norms))
