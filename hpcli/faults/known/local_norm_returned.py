"""Each rank returns the norm of what it holds itself."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="the rank's own norm returned",
    source="hyper-parallel issue-64",
    rule="every rank combines the records of all ranks",
    layout="fsdp{ranks}",
    cause="local-norm-returned",
    wrong="shards with gradients 3 and 4: 3 on one rank, 4 on the other",
    right="5 on both",
    why="sqrt(9 + 16) = 5",
)


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
