"""The average of gloo is a sum."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="pytorch-162338",
    title="gloo's AVG was a sum",
    kind="reduce",
    source="pytorch#162338",
    condition="an all-reduce with ReduceOp.AVG of 1 on rank 0 and 2 on rank 1",
    shown_by="mended",
    wrong=3.0,
    right={"torch's AVG": 1.5, "check-norm's self-test of collectives": True},
    how_we_know="(1 + 2) / 2",
    why="gloo ran AVG as SUM and returned without an error, so every reference that was made with it was "
    "wrong by the number of ranks. Torch 2.13 has it right, which was run here. An oracle must test what it "
    "stands on, and check-norm adds up powers of two first.",
)


def right() -> dict[str, Any]:
    import torch

    from hpcli.check.rank_program import _self_test
    from hpcli.faults.parameters import over_ranks

    return {
        "torch's AVG": over_ranks(_own(), "avg"),
        "check-norm's self-test of collectives": _self_test(torch.device("cpu")),
    }


def wrong() -> float:
    from hpcli.faults.parameters import over_ranks

    return over_ranks(_own(), "sum")


def _own() -> float:
    import torch.distributed as dist

    return 1.0 + dist.get_rank()
