"""Where offloaded shards live: host memory. On a CPU there is but one memory, and the same copies are made in it."""

from __future__ import annotations

import mindspore as ms

from hyper_parallel.platform.mindspore.tensors import copied, on_host


def to_host(tensor: ms.Tensor) -> ms.Tensor:
    """A copy in host memory."""
    return copied(tensor) if on_host() else tensor.move_to("CPU", blocking=True)


def to_device(tensor: ms.Tensor) -> ms.Tensor:
    """A copy on the device that computes."""
    return copied(tensor) if on_host() else tensor.move_to("Ascend", blocking=True)
