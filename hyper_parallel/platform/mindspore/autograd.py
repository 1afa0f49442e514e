"""MindSpore's autograd as this package uses it, in one place: own functions, a recorded forward, a backward of its own.

``value_and_grad`` cannot be split into a forward and a later backward, which a pipeline needs. ``run_backward`` is the engine below it
in MindSpore 2.10; it takes the outputs of recorded computations, several of which may be outstanding. It is only used with the
inputs named and without accumulating into them: accumulation permutes the values of strided gradients (2.10.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore._c_expression import run_backward
from mindspore.common._grad_function import _Function as Function
from mindspore.common.api import _no_grad as no_grad
from mindspore.common.api import _pynative_executor as _executor

from hyper_parallel.platform.mindspore.tensors import copied

__all__ = ["Function", "backward", "detached", "is_recording", "no_grad", "recording", "requiring_grad", "saved_tensors"]


@contextmanager
def recording() -> Iterator[None]:
    """Record what is computed inside, for a later :func:`backward`."""
    before = _executor.grad_flag(), _executor.enable_grad()
    _executor.set_grad_flag(True)
    _executor.set_enable_grad(True)  # it is off inside another backward
    try:
        yield
    finally:
        _executor.set_grad_flag(before[0])
        _executor.set_enable_grad(before[1])


def is_recording() -> bool:
    """Whether what is computed now will take part in a backward."""
    return bool(_executor.requires_grad())


def requiring_grad(tensor: ms.Tensor) -> ms.Tensor:
    """``tensor`` itself, marked as one whose gradient is wanted; to be called before it is used."""
    tensor._requires_grad = True
    return tensor


def detached(tensor: ms.Tensor) -> ms.Tensor:
    """The values of ``tensor`` in a tensor of their own, which no computation led to."""
    return copied(tensor.contiguous())


def backward(
    output: ms.Tensor, gradient: ms.Tensor | None, inputs: Sequence[ms.Tensor]
) -> tuple[ms.Tensor | None, ...]:
    """The gradients of ``inputs``, of the gradient of a recorded ``output``; the record is used up.

    Args:
        gradient: of ``output``'s shape; None stands for 1.
        inputs: parameters, and tensors marked by :func:`requiring_grad`; None is returned for those that ``output`` does not
            depend on.
    """
    seed = ms.mint.ones(output.shape, dtype=output.dtype) if gradient is None else gradient
    found = run_backward((output,), (seed,), False, False, tuple(inputs), True, accumulate_grad=False)
    return tuple(found)


@contextmanager
def saved_tensors(pack: Any, unpack: Any) -> Iterator[None]:
    """What autograd saves inside goes through ``pack``, and comes back through ``unpack`` when backward needs it."""
    with ms.saved_tensors_hooks(pack, unpack):
        yield
