"""Rank programs for the launcher's tests: each behaves, or misbehaves, in one way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hpcli.launch.context import RankContext


def start_group(context: RankContext) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=context.timeout_seconds),
    )
    return dist


def add_up(context: RankContext, payload: dict[str, Any]) -> None:
    """All-reduce the ranks' numbers once a step; rank 0 tells the sums."""
    import torch

    dist = start_group(context)
    for step in range(1, payload["steps"] + 1):
        context.progress(step, "forward")
        value = torch.tensor(float(context.rank * step))
        dist.all_reduce(value)
        if context.rank == 0:
            context.emit({"event": "step", "step": step, "sum": value.item()})
    dist.destroy_process_group()


def no_warm_up() -> None:
    """For tests that need no torch."""


def broken_warm_up() -> None:
    import a_module_that_does_not_exist  # type: ignore[import-not-found]  # noqa: F401


def deadly_warm_up() -> None:
    import os

    print("about to die", flush=True)
    os.abort()


def threaded_warm_up() -> None:
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()


def fail_in_step_2(context: RankContext, payload: dict[str, Any]) -> None:
    """All-reduce forever, but rank `payload["rank"]` does `payload["how"]` in step 2."""
    import torch

    dist = start_group(context)
    for step in range(1, 10_000):
        context.progress(step, "forward")
        dist.all_reduce(torch.ones(1000))
        context.progress(step, "backward")
        if context.rank == payload["rank"] and step == 2:
            misbehave(payload["how"])


def misbehave(how: str) -> None:
    import os
    import signal
    import sys
    import time

    if how == "raise":
        raise ValueError("a planted error")
    if how == "os._exit":
        os._exit(0)
    if how == "sys.exit":
        sys.exit(3)
    if how == "sleep":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, how))


def alone(context: RankContext, payload: dict[str, Any]) -> None:
    """Without torch: tell the parent this rank's pid, then do `payload["how"]` in step 3 (data) or wait."""
    import os
    import time

    context.progress(3, "data")
    context.emit({"event": "pid", "rank": context.rank, "pid": os.getpid()})
    if payload.get("rank") == context.rank:
        misbehave(payload["how"])
    while payload.get("wait"):
        time.sleep(0.05)
        context.progress(3, "data")


def say(context: RankContext, payload: dict[str, Any]) -> None:
    """Emit `count` numbered events on every rank, with `size` characters each."""
    for number in range(payload["count"]):
        context.emit({"event": "say", "rank": context.rank, "number": number, "text": "x" * payload["size"]})


def echo(context: RankContext, payload: dict[str, Any]) -> None:
    context.emit({"event": "echo", "payload": payload, "size": len(payload.get("text", ""))})


def emit_unfit(context: RankContext, payload: dict[str, Any]) -> None:
    context.emit({"event": "unfit", "value": {1, 2}})


def print_lines(context: RankContext, payload: dict[str, Any]) -> None:
    import sys

    print("the same on all ranks")
    print(f"only on rank {context.rank}", file=sys.stderr)


def leave_a_child(context: RankContext, payload: dict[str, Any]) -> None:
    import subprocess

    child = subprocess.Popen(["sleep", "1000"])
    context.emit({"event": "pid", "rank": context.rank, "pid": child.pid})


def until_stopped(context: RankContext, payload: dict[str, Any]) -> None:
    import time

    context.emit({"event": "started"})
    while not context.stop_requested:
        time.sleep(0.01)
        context.progress(1, "forward")


def wait_for_nothing(context: RankContext, payload: dict[str, Any]) -> None:
    """Rank 1 waits in another collective than the others."""
    import torch

    dist = start_group(context)
    context.progress(1, "forward")
    if context.rank == 1:
        dist.barrier()
    else:
        dist.all_gather([torch.ones(1) for _ in range(context.world_size)], torch.ones(1))


def all_reduce_of_unequal_sizes(context: RankContext, payload: dict[str, Any]) -> None:
    import torch

    dist = start_group(context)
    context.progress(1, "forward")
    dist.all_reduce(torch.ones(100_000 if context.rank == 0 else 1000))


def leave_the_group(context: RankContext, payload: dict[str, Any]) -> None:
    """Rank 1 ends its process group and stays alive; the others wait for it."""
    import time

    import torch

    dist = start_group(context)
    dist.barrier()
    if context.rank == 1:
        context.progress(1, "finish")
        dist.destroy_process_group()
        time.sleep(1000)
    context.progress(1, "forward")
    dist.all_reduce(torch.ones(10))


def report_bits(context: RankContext, payload: dict[str, Any]) -> None:
    """Rank 0 tells an all-reduced number, its threads and its launcher."""
    import torch

    dist = start_group(context)
    context.progress(1, "forward")
    generator = torch.Generator().manual_seed(context.rank)
    value = torch.randn(300_000, generator=generator).sum()
    dist.all_reduce(value)
    threads = torch.get_num_threads()
    context.emit({"event": "bits", "rank": context.rank, "value": value.item().hex(), "threads": threads})
    if payload.get("rank") == context.rank:
        misbehave(payload["how"])
    dist.destroy_process_group()


def fail_after_peers_report(context: RankContext, payload: dict[str, Any]) -> None:
    """Rank 1 fails at once; rank 0 reports a little earlier than the run is ended."""
    import time

    if context.rank == 1:
        raise ValueError("a planted error")
    time.sleep(0.05)
    context.emit({"event": "late"})
    time.sleep(1000)
