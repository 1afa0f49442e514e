"""``torch.npu`` as the simulated device answers it: one device, no-op streams, no memory statistics.

Every index means the one device of the process, so that scripts that choose their device by local rank run unchanged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.platform.npu_sim import generator

if TYPE_CHECKING:
    from typing_extensions import Self

_initialized = True  # activation checkpointing saves the random state of initialised devices only
_PRIVATE_USE = 20  # c10's number of this kind of device


class Stream(torch.Stream):
    """A queue of work that has always been done: everything runs at once, in the calling thread."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(cls, stream_id=0, device_index=0, device_type=_PRIVATE_USE)

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        """Arguments are accepted and change nothing."""

    def wait_event(self, event: Any) -> None:
        """Return: what it would wait for is done."""

    def wait_stream(self, stream: Any) -> None:
        """Return: what it would wait for is done."""

    def synchronize(self) -> None:
        """Return: what it would wait for is done."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """A moment. It has always happened; only its time is kept."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self.seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return: it has happened."""

    def synchronize(self) -> None:
        """Return: it has happened."""

    def query(self) -> bool:
        """True: it has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return (end.seconds - self.seconds) * 1e3


_stream = None


def current_stream(device: Any = None) -> Stream:
    """The one stream."""
    global _stream
    if _stream is None:
        _stream = Stream()
    return _stream


default_stream = current_stream


@contextlib.contextmanager
def stream(stream: Any) -> Iterator[None]:
    """A block that changes nothing."""
    yield


def set_stream(stream: Any) -> None:
    """Change nothing."""


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """A block that changes nothing."""
    yield


def is_available() -> bool:
    """True."""
    return True


def is_initialized() -> bool:
    """True."""
    return True


def init() -> None:
    """Nothing to do."""


def _lazy_init() -> None:
    """Nothing to do."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """1: each process sees a device of its own."""
    return 1


def current_device() -> int:
    """0."""
    return 0


def set_device(device: Any) -> None:
    """Every device is this one."""


def synchronize(device: Any = None) -> None:
    """Return: all work is done."""


def empty_cache() -> None:
    """Nothing is cached."""


def get_device_name(device: Any = None) -> str:
    """What it is."""
    return "simulated NPU (host memory)"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes of autocast."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """True."""
    return True


def manual_seed(seed: int) -> None:
    """Start the device's random numbers anew."""
    generator.manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    """The seed that was set last."""
    return generator.initial_seed()


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    """Seed and offset, 16 bytes on the CPU."""
    return generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    """Go on where ``new_state`` was taken."""
    generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of the one device."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Go on where the states were taken."""
    for state in new_states:
        set_rng_state(state)
