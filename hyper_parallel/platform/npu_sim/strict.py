"""Strict mode: what Ascend refuses and the CPU, whose kernels are borrowed, would silently do.

* In-place arithmetic on a half-precision tensor with a float32 tensor, a 0-dim one too. (Torch lets 0-dim tensors adapt.)
* Arithmetic on float64 tensors. Creating, copying, casting and gathering them is allowed; reducing them over ranks is not.

Which further pairs of dtypes an Ascend refuses could not be tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch._ops import OpOverload

enabled = False

_HALVES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
_WIDE = (torch.float64, torch.complex128)
_MOVES = frozenset(
    ("cat", "clone", "copy_", "equal", "fill_", "gather", "index", "index_select", "masked_fill_", "where", "zero_")
)
"""No arithmetic: allowed on float64."""


def check(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where Ascend would refuse the dtypes of the arguments.

    Raises:
        RuntimeError: in the words that torch has for a result that cannot be cast, or naming float64.
    """
    name = op._schema.name.partition("::")[2]
    tensors = list(_tensors(chain(args, kwargs.values())))
    if name not in _MOVES and (any(t.dtype in _WIDE for t in tensors) or kwargs.get("dtype") in _WIDE):
        raise RuntimeError(f"{op} on float64: the device has no float64 arithmetic (device_options.strict_dtypes)")
    if name.endswith("_") and not name.startswith("_fused") and name != "copy_":
        half = next((_HALVES[written.dtype] for written in _tensors(args[:1]) if written.dtype in _HALVES), None)
        if half and any(other.dtype is torch.float32 for other in _tensors(chain(args[1:], kwargs.values()))):
            raise RuntimeError(f"result type Float can't be cast to the desired output type {half}")


def check_reduction(tensors: Any) -> None:
    """HCCL gathers float64 but does not reduce it.

    Raises:
        RuntimeError: naming float64.
    """
    if any(tensor.dtype in _WIDE for tensor in _tensors([tensors])):
        raise RuntimeError("hccl does not reduce float64 tensors (device_options.strict_dtypes)")


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """The device's tensors among the arguments. A Python number arrives as a CPU tensor, and is welcome in any dtype."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if argument.device.type == "npu":
                yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
