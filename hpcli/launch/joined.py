"""Runs this process as one rank of torchrun, srun or msrun, which start, watch and end the ranks themselves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from hpcli.launch.context import RankContext
from hpcli.launch.diagnosis import Ending, Nature
from hpcli.launch.environment import Joined
from hpcli.launch.errors import RankFailure
from hpcli.launch.heartbeat import Pulse
from hpcli.launch.local import meet_on_loopback, use_one_thread
from hpcli.launch.rank import describe, load_function
from hpcli.launch.stacks import Frame, collective


def run_joined(
    joined: Joined,
    target: str,
    payload: dict[str, Any],
    *,
    timeout_seconds: float,
    on_event: Callable[[dict[str, Any]], None],
) -> None:
    """Run `target` ("package.module:function") here as rank `joined.rank`; `on_event` is called on rank 0 only.

    Returns at once in msrun's scheduler process, which is no rank. Raises RankFailure, from the original
    exception, when the program fails; KeyboardInterrupt and errors of `on_event` pass unchanged.
    """
    if joined.scheduler:
        return
    # As local ranks have it: the order of a sum, and so its last bits, depends on the number of threads.
    use_one_thread(os.environ)
    if joined.one_host:
        meet_on_loopback(os.environ)
    from hyper_parallel.platform.torch.loading import import_torch

    import_torch()
    import torch

    torch.set_num_threads(1)
    report_errors: list[BaseException] = []

    def send(event: dict[str, Any]) -> None:
        if joined.rank != 0:
            return
        try:
            on_event(event)
        except BaseException as error:
            report_errors.append(error)
            raise

    pulse = Pulse.private()
    context = RankContext(
        rank=joined.rank,
        world_size=joined.world_size,
        local_rank=joined.local_rank,
        local_world_size=joined.local_world_size,
        host=socket.gethostname(),
        init_method=joined.init_method,
        store_path=None,
        timeout_seconds=timeout_seconds,
        launcher=joined.launcher,
        pulse=pulse,
        send=send,
    )
    context.progress(0, "start")
    try:
        load_function(target)(context, payload)
    except (Exception, SystemExit) as error:
        if any(error is known for known in report_errors):
            raise
        raise _failure(context, error) from error


def _failure(context: RankContext, error: BaseException) -> RankFailure:
    described = describe(error)
    frames = tuple(Frame(*frame) for frame in described["frames"])
    beat = context.last_beat
    ending = Ending(context.rank, beat.time, beat, described["type"], described["message"], frames=frames)
    who = f"rank {context.rank} on {context.host}"
    waited = collective(frames) or "a collective"
    first_line = next(iter(ending.message.strip().splitlines()), "(no message)")
    if ending.type == "SystemExit":
        text = f"{who} {ending.message}, {beat.place}"
    elif ending.nature is Nature.TIMEOUT:
        text = (
            f"{who} waited in {waited} {beat.place} until launch.timeout_seconds "
            f"({context.timeout_seconds:g} s) was over: a rank that reports nothing hangs ({first_line})"
        )
    elif ending.nature is Nature.PEER:
        text = f"{who} lost its connection to another rank in {waited} {beat.place}; see that rank's error ({first_line})"
    else:
        text = f"{who} failed {beat.place}: {ending.type}: {ending.message or '(no message)'}"
    return RankFailure(text, rank=context.rank, step=beat.step, details=described["traceback"])
