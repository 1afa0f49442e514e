"""Replicas all count: the norm is too large by the root of their number."""

from __future__ import annotations

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="replicated parameters counted on every replica",
    source="VeOmni#184",
    rule="of the ranks that hold a piece, one counts it",
    layout="hsdp2x{half}",
    cause="replicated-counted-n-times",
    wrong="2x2 ranks, gradients 1..4, [Replicate, Shard(0)]: sqrt(60) = 7.746",
    right="sqrt(30) = 5.477",
    why="1 + 4 + 9 + 16 = 30, and each element is on two ranks",
)


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm import plan

    replace(plan, "lowest_is_this_rank", lambda ranks: True)
