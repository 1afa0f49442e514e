"""The kernels that cannot be borrowed from the CPU: those that make memory, copy between devices or change a tensor's memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.library import fallthrough_kernel

from hyper_parallel.platform.npu_sim import memory
from hyper_parallel.platform.npu_sim.copying import count_copy
from hyper_parallel.platform.npu_sim.fallback import CPU_KEYS, run_on_host
from hyper_parallel.platform.npu_sim.memory import on_device, on_host

aten = torch.ops.aten


def register() -> list[torch.library.Library]:
    """Give the device its kernels; they last as long as what is returned."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run_on_host, "PrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for name in _taken_apart():
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, partial(run_on_host, operation), "PrivateUse1")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # their general kernels would copy by _copy_from again, endlessly
        library.impl("_copy_from", fallthrough_kernel, key)
    library.impl("_pin_memory", _pin_memory, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")
    return [everything, library]


def _taken_apart() -> list[str]:
    """Operations that would come to the fallback in parts, though the CPU has one kernel for the whole: the structured ones (an
    allocation, then `out=`) and those on lists (one by one). Taking them whole is three times as fast.

    `_foreach_copy_` is not among them: it may copy between devices.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    structured = [n for n in names if has_kernel(n, "CompositeExplicitAutogradNonFunctional") and has_kernel(n, "CPU")]
    lists = [n for n in names if n.startswith("aten::_foreach_") and not n.startswith("aten::_foreach_copy")]
    return [name.partition("::")[2] for name in (*structured, *lists)]


def _empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    return on_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format))


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _host_side(tensor: torch.Tensor) -> torch.Tensor:
    return on_host(tensor) if tensor.device.type == "npu" else tensor


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    from_device, to_device = source.device.type == "npu", target.device.type == "npu"
    if from_device != to_device:
        count_copy(source, to_host=from_device)
    _host_side(target).copy_(_host_side(source))
    return target


def _to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    from_device = source.device.type == "npu"
    to_device = from_device if device is None else device.type == "npu"
    host = aten._to_copy.default(_host_side(source), dtype=dtype, memory_format=memory_format)
    if from_device != to_device:
        count_copy(source, to_host=from_device)
    if to_device:
        return on_device(host)
    # as on hardware: what is copied asynchronously lands in pinned memory
    return _pin_memory(host) if non_blocking else host


def _item(tensor: torch.Tensor) -> Any:
    return aten._local_scalar_dense.default(on_host(tensor))


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    host = on_host(tensor)
    wanted = torch.empty(size, dtype=tensor.dtype, memory_format=memory_format or torch.contiguous_format)
    if tuple(size) == tuple(tensor.shape):
        return tensor
    if wanted.numel() + tensor.storage_offset() <= tensor.untyped_storage().nbytes() // tensor.element_size():
        return aten.set_.source_Storage_storage_offset(
            tensor, tensor.untyped_storage(), tensor.storage_offset(), wanted.shape, wanted.stride()
        )
    if host.numel() and host.is_contiguous():
        wanted.view(-1)[: host.numel()].copy_(host.view(-1))
    return tensor.set_(on_device(wanted))  # type: ignore[call-overload]


def _resize_as_copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.shape != source.shape:
        target.resize_(source.shape)
    return _copy_from(source, target)


def _set_to_storage(tensor: torch.Tensor, storage: Any) -> torch.Tensor:
    elements = storage.nbytes() // tensor.element_size()
    return aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, tensor, storage, 0, [elements], [1])


def _set_to_part_of_storage(tensor: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any = ()) -> torch.Tensor:
    return aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, tensor, storage, offset, size, stride)


def _set_to_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEYS, tensor, source.untyped_storage(), source.storage_offset(), source.shape, source.stride()
    )


def _set_to_nothing(tensor: torch.Tensor) -> torch.Tensor:
    return _set_to_tensor(tensor, torch.empty(0, dtype=tensor.dtype, device="npu"))


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    dense_stride = torch.empty_like(tensor).stride()
    return memory.pinned_empty(tensor.shape, dense_stride, tensor.dtype).copy_(tensor)


def _is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    return memory.is_pinned(tensor)


def _convolution(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    return run_on_host(aten.convolution.default, tensor, weight, bias, *settings)


def _convolution_backward(
    grad: torch.Tensor,
    tensor: torch.Tensor,
    weight: torch.Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
) -> Any:
    settings = (stride, padding, dilation, transposed, output_padding, groups, output_mask)
    return run_on_host(aten.convolution_backward.default, grad, tensor, weight, [weight.shape[0]], *settings)


_KERNELS: dict[str, Any] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _resize_as_copy,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _item,
    # Torch asks before it gives a parameter memory on another device (`module.to`, FSDP2).
    "_has_compatible_shallow_copy_type": lambda tensor, other: True,
    "record_stream": lambda tensor, stream: None,
    "resize_": _resize,
    "set_": _set_to_nothing,
    "set_.source_Tensor": _set_to_tensor,
    "set_.source_Storage": _set_to_storage,
    "set_.source_Storage_storage_offset": _set_to_part_of_storage,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
