"""A rank that hangs is not named by those that wait for it."""

from __future__ import annotations

from hpcli.faults.entry import ByRank, Entry, Raises, Says

ENTRY = Entry(
    id="probe-sleeping-rank",
    title="a hung rank: the timeout of the others does not name it",
    kind="launcher",
    source="torch 2.13, measured",
    condition="2 ranks, rank 1 sleeps for longer than the timeout of the process group; then the same in "
    "step 2 of hpcli train",
    shown_by="stock",
    wrong=ByRank((Raises("imed out waiting"), "slept")),
    right=ByRank((Says("rank 1"), "")),
    how_we_know="rank 1 is the one that sleeps",
    why="The rank that waits is the one that raises, so the traceback shows where nothing is wrong. With "
    "hundreds of ranks all tracebacks look alike, but for the one that is missing. Heartbeats show who "
    "stopped, and the stacks of the others what they wait for.",
    alone=True,
    timeout_seconds=3.0,
    seconds=11.0,
)


def right() -> str:
    from hpcli.faults.own_runs import error_of_training

    return error_of_training("sleep:rank=1,step=2")


def wrong() -> str:
    import time

    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(4.0)
        return "slept"
    dist.all_reduce(torch.ones(1))
    return "no error"
