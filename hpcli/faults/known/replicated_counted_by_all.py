"""Replicas all count: the norm is too large by the root of their number."""

from __future__ import annotations

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="replicated parameters counted on every replica",
    source="VeOmni#184",
    rule="of the ranks that hold a piece, one counts it",
    layout="hsdp2x{half}",
    cause="replicated-counted-n-times",
)
ENTRY = Entry(
    id="veomni-184",
    title=FAULT.title,
    kind="ranks",
    source=FAULT.source,
    condition="a 2x2 mesh (replicate, shard), one weight with gradient (1, 2, 3, 4), placed [Replicate, "
    "Shard(0)]",
    shown_by="planted",
    wrong=60**0.5,
    right=30**0.5,
    how_we_know="1 + 4 + 9 + 16 = 30; each element lies on two ranks, so that a sum over all of them is 60",
    why="Each shard lies on as many ranks as there are replicas. A sum of squares over all ranks counts it "
    "once for each of them, so the norm grows by the root of their number and clipping sets in too early. "
    "Of the ranks that hold a piece, exactly one may count it.",
    ranks=(4,),
)


def right() -> float:
    from hpcli.faults.parameters import ranks_mesh, with_gradient
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([with_gradient([1, 2, 3, 4], ranks_mesh(2, 2), "R S0")], 1.0).item()


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm import plan

    replace(plan, "lowest_is_this_rank", lambda ranks: True)
