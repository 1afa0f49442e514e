"""Two jobs on one machine want the same port."""

from __future__ import annotations

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="torchdr-249",
    title="a second job finds the port of the first in use",
    kind="launcher",
    source="TorchDR#249",
    condition="a port on which something listens, and a job whose ranks are to meet there; then 2 ranks of "
    "this launcher, which add up 1 + 1",
    shown_by="stock",
    wrong=Raises("address already in use", "DistNetworkError"),
    right=2.0,
    how_we_know="a port has one listener; ranks that meet over a file of their own need none",
    why="29500 is everybody's default, and the second job on a machine finds it taken. Whoever gets it by "
    "luck may meet the ranks of another job. Local ranks meet over a file in a folder that only they know.",
)


def right() -> float:
    from hpcli.faults.parameters import over_ranks

    return over_ranks(1.0)


def wrong() -> None:
    import socket
    from datetime import timedelta

    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as other_job:
        port = other_job.getsockname()[1]
        TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=5))
