"""Host memory in two guises: an ``npu`` tensor and a CPU tensor over the same bytes, without a copy.

A DLPack capsule names the device of a tensor's memory; changing that field before torch reads the capsule gives a tensor
on another device. The new tensor keeps the old one alive, so memory is never freed under either of them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_HOST, _DEVICE = 1, 12  # kDLCPU and kDLExtDev of dlpack.h, both with device index 0 in the upper half
_DEVICE_FIELD = 8  # DLManagedTensor begins with the data pointer, then DLDevice {int32 type; int32 index}
_POISON = 0xFF  # NaN in every floating-point format, -1 in every signed integer

_pointer_of = ctypes.PyDLL(None).PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
_field_at = ctypes.c_int64.from_address
_to_dlpack = torch._C._to_dlpack
_from_dlpack = torch._C._from_dlpack


def on_device(host: torch.Tensor) -> torch.Tensor:
    """The memory of a CPU tensor as a tensor on ``npu:0``, with a storage of its own."""
    capsule = _to_dlpack(host)
    _field_at(_pointer_of(capsule, b"dltensor") + _DEVICE_FIELD).value = _DEVICE
    return _from_dlpack(capsule)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of an ``npu`` tensor as a CPU tensor: same shape and strides, no autograd history."""
    capsule = _to_dlpack(tensor)
    _field_at(_pointer_of(capsule, b"dltensor") + _DEVICE_FIELD).value = _HOST
    return _from_dlpack(capsule)


# Address of a pinned buffer -> its owner. Torch keeps the owner alive as long as a storage uses the buffer.
_pinned: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()


def pinned_empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor in memory that counts as page-locked."""
    if 0 in size:
        return torch.empty_strided(size, stride, dtype=dtype)
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    owner = np.empty(elements * dtype.itemsize, np.uint8)
    buffer = torch.from_numpy(owner)
    _pinned[buffer.data_ptr()] = owner
    return buffer.view(dtype).as_strided(size, stride)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the storage of a CPU tensor was made by :func:`pinned_empty`."""
    return tensor.untyped_storage().data_ptr() in _pinned


_resize_storage = torch.UntypedStorage.resize_


def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """``UntypedStorage.resize_`` that poisons what is freed on the device instead of freeing it.

    FSDP2 frees a buffer by resizing its storage to 0 and allocates it again with its old size. Here its bytes stay and turn
    into NaN, so that whoever reads it in between is found out.

    Raises:
        RuntimeError: growing a storage of the device.
    """
    if storage.device.type != "npu":
        _resize_storage(storage, size)
        return storage
    if size == 0:
        ctypes.memset(storage.data_ptr(), _POISON, storage.nbytes())
    elif size > storage.nbytes():
        raise RuntimeError(f"the simulated NPU cannot grow a storage of {storage.nbytes()} bytes to {size} bytes")
    return storage


def move_storage(storage: Any, device: Any, non_blocking: Any = False) -> Any:
    """``torch.storage._to``: a storage on another device. (Torch's own dies on a device without an allocator in C++.)"""
    if storage.device == device:
        return storage
    if storage.device.type not in ("cpu", "npu") or device.type not in ("cpu", "npu"):
        return _move_storage(storage, device, non_blocking)
    moved: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).to(device, copy=True)
    return moved.untyped_storage()


_move_storage = torch.storage._to
