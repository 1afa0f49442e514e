"""Each rank returns the norm of what it holds itself."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="the rank's own norm returned",
    source="hyper-parallel issue-64",
    rule="every rank combines the records of all ranks",
    layout="fsdp{ranks}",
    cause="local-norm-returned",
)
ENTRY = Entry(
    id="torchtitan-766",
    title=FAULT.title,
    kind="dtensor",
    source="torchtitan#766",
    condition="a weight sharded over 2 ranks, gradient 3 on rank 0 and 4 on rank 1",
    shown_by="planted",
    wrong=ByRank((3.0, 4.0)),
    right=5.0,
    how_we_know="sqrt(9 + 16) = 5; a shard of one element has the norm of that element",
    why="Each rank measures its shard, and the exchange with the others is left out or its result not used. "
    "The numbers are plausible, too small by about the root of the number of shards, and only a look at "
    "several ranks shows that they differ. Here every rank combines the same records of all of them.",
)


def right() -> float:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([with_local_gradient([3.0 + dist.get_rank()], ranks_mesh(), "S0")], 1.0).item()


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm import combine

    gather = combine._gather_records

    def only_mine(scope: Any, record: Any) -> Any:
        return tuple(record for _ in gather(scope, record))

    conclude = combine.conclude

    def of_this_rank(records: Any, p: float) -> Any:
        return conclude(records[:1], p)

    replace(combine, "_gather_records", only_mine)
    replace(combine, "conclude", of_this_rank)
