"""What the rank server does before it forks: import all that ranks use and, for the CPU, run it once, small.

Afterwards no process group may be alive and no thread may run: a fork copies neither rightly.
"""

from __future__ import annotations

import importlib

from hpcli.launch.errors import LaunchError


def warm() -> None:
    """Import everything and train a step. Raises LaunchError with the remedy where torch is missing."""
    load()
    from hpcli.train.warmup import warm_up

    warm_up()
    _check_no_process_group()


def warm_simulated_npu() -> None:
    """As :func:`warm`, on the CPU and then on the simulated NPU, which is in place in the ranks from then on.

    In this order: with the first backward pass, torch starts a thread for every accelerator that it sees.
    """
    warm()
    from hpcli.train.warmup import warm_up
    from hyper_parallel.platform.npu_sim import SimulatedNpuError, install

    try:
        install()
    except SimulatedNpuError as error:
        raise LaunchError(str(error)) from error
    warm_up("sim-npu")
    _check_no_process_group()


def load_npu() -> None:
    """As :func:`load`, with torch_npu. Raises LaunchError with the remedy where it or CANN is missing."""
    load()
    from hyper_parallel.platform.torch.loading import DeviceMissingError, load_torch_npu

    try:
        load_torch_npu()
    except DeviceMissingError as error:
        raise LaunchError(str(error)) from error


def load() -> None:
    """Import everything, touch no device."""
    try:
        import torch
    except ImportError as error:
        raise LaunchError(
            f"PyTorch cannot be imported ({error}); `hpcli doctor` shows what is missing"
        ) from error
    torch.set_num_threads(1)
    for name in ("hpcli.train.loop", "hpcli.train.warmup"):
        importlib.import_module(name)
    _check_no_process_group()


def _check_no_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        raise LaunchError("the warm-up left a process group behind; a forked rank that uses it would hang")
