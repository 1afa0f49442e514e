"""``torch.autocast("npu")``: matrix products compute in the chosen half precision, everything else in what it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import fallthrough_kernel

_LOWERED = (
    "addmm",
    "baddbmm",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "matmul",
    "mm",
    "scaled_dot_product_attention",
)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def register() -> list[torch.library.Library]:
    """Give autocast its kernels for the device."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for name in _LOWERED:
        library.impl(name, _lowered(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    return [everything, library]


def _lowered(operation: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            dtype = torch.get_autocast_dtype("npu")
            return operation(*(_cast(argument, dtype) for argument in args), **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return run


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    is_wide = isinstance(argument, torch.Tensor) and argument.dtype == torch.float32 and argument.device.type == "npu"
    return argument.to(dtype) if is_wide else argument
