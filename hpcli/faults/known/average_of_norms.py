"""The ranks' norms are averaged."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="the ranks' norms averaged",
    source="DeepSpeed#8475",
    rule="norms combine as the p-th root of the sum of their p-th powers",
    layout="fsdp{ranks}",
    cause="average-of-norms",
)
ENTRY = Entry(
    id="deepspeed-8475",
    title=FAULT.title,
    kind="ranks",
    source=FAULT.source,
    condition="one weight sharded over 2 ranks, the squares of its gradient are 20 on rank 0 and 100 on "
    "rank 1",
    shown_by="planted",
    wrong=(20**0.5 + 100**0.5) / 2,
    right=120**0.5,
    how_we_know="squares add up, norms do not: sqrt(20 + 100) = 10.954452; (sqrt(20) + sqrt(100)) / 2 = "
    "7.236068",
    why="Each rank has the norm of its own shard, and the mean of these looks like a norm. It is too small "
    "by a factor that depends on how evenly the gradient is spread, so it cannot be corrected afterwards. "
    "Only the squares may be added, and the root be taken once.",
)


def right() -> float:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient
    from hyper_parallel import clip_grad_norm_

    shard = [[2.0, 4.0], [6.0, 8.0]][dist.get_rank()]
    return clip_grad_norm_([with_local_gradient(shard, ranks_mesh(), "S0")], 1.0).item()


def patch() -> None:
    from hyper_parallel.core import norm_exchange

    def average(norms: Any, p: float) -> float:
        values = list(norms)
        return math.fsum(values) / len(values)

    replace(norm_exchange, "combine", average)
