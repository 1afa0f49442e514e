"""The largest of the ranks' norms is taken."""

from __future__ import annotations

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="the largest of the ranks' norms taken",
    source="DeepSpeed#1252",
    rule="norms combine as the p-th root of the sum of their p-th powers; the maximum is for p = inf alone",
    layout="fsdp{ranks}",
    cause="maximum-of-norms",
)
ENTRY = Entry(
    id="deepspeed-1252",
    title=FAULT.title,
    kind="ranks",
    source=FAULT.source,
    condition="one weight with gradient 1..8 sharded over 4 ranks, two elements each",
    shown_by="planted",
    wrong=113**0.5,
    right=204**0.5,
    how_we_know="1 + 4 + ... + 64 = 204, its root is 14.2829; the ranks have 2.2361, 5, 7.8102 and sqrt(49 "
    "+ 64) = 10.6301",
    why="The maximum is how norms of type inf combine, and a reduction with MAX is easily left in for the "
    "others. The rank with the largest shard then decides alone. It looks plausible, since the largest of N "
    "norms is at least 1/sqrt(N) of the whole.",
    ranks=(4,),
)


def right() -> float:
    from hpcli.faults.parameters import ranks_mesh, with_gradient
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([with_gradient([1, 2, 3, 4, 5, 6, 7, 8], ranks_mesh(), "S0")], 1.0).item()


def patch() -> None:
    from hyper_parallel.core import norm_exchange

    replace(norm_exchange, "combine", lambda norms, p: max(norms))
