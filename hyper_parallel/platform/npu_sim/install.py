"""Putting the device in place, or saying why it cannot be."""

from __future__ import annotations

import sys

import torch

PROVEN = ((2, 13),)
"""The torch releases on which this was tested. It uses private parts of torch, which may change in any other."""

_PARTS = ("_to_dlpack", "_from_dlpack", "_set_multithreading_enabled", "_acc")
_libraries: list[torch.library.Library] = []  # kernels are unregistered when theirs goes
_wrong: list[str] = []  # what the probe found


class SimulatedNpuError(RuntimeError):
    """The simulated NPU cannot be used in this process."""


def obstacle() -> str | None:
    """Why the simulated NPU cannot start in this process, in words; ``None`` where it can, or has."""
    if _libraries:
        return f"it does not work with torch {torch.__version__}: wrong {', '.join(_wrong)}" if _wrong else None
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release not in PROVEN:
        proven = ", ".join(".".join(map(str, known)) for known in PROVEN)
        return f"it was tested on torch {proven} only, not on torch {torch.__version__}: pip install 'torch=={proven}.*'"
    loaded = sys.modules.get("torch_npu")
    if loaded is not None and getattr(loaded, "__version__", None) is not None:
        return "torch_npu, the real device, is loaded in this process: use device npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "npu") or hasattr(torch, name):
        return f"torch's one place for a device of one's own is taken by {name!r} in this process"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "this torch has no gloo backend, over which its collectives run"
    missing = [part for part in _PARTS if not hasattr(torch._C, part)]
    return f"this torch lacks torch._C.{missing[0]}" if missing else None


def install(*, strict_dtypes: bool = False) -> None:
    """Make the simulated NPU available in this process: device "npu", backend "hccl", ``torch.npu``.

    Call it before ``init_process_group("hccl")``. A second call changes ``strict_dtypes`` alone.

    Backward passes of the calling thread run in that thread from now on. With the thread that torch starts for an accelerator,
    a script that ends right after its last backward dies every now and then ("terminate called without an active exception"),
    because that thread takes Python's lock while Python ends.

    Args:
        strict_dtypes: refuse what Ascend refuses: in-place arithmetic of a half-precision tensor with a float32 tensor, and
            arithmetic on float64.

    Raises:
        SimulatedNpuError: :func:`obstacle` says why, or the probe at the end found the device wrong.
    """
    reason = obstacle()
    if reason is not None:
        raise SimulatedNpuError(f"the simulated NPU cannot start: {reason}")
    if not _libraries:
        _put_in_place()
        _probe()
    from hyper_parallel.platform.npu_sim import strict

    strict.enabled = strict_dtypes
    torch._C._set_multithreading_enabled(False)


def _put_in_place() -> None:
    # imported here: they use private parts of torch, which another release may lack
    from hyper_parallel.platform.npu_sim import autocast, backend, collectives, device, kernels, memory

    torch.utils.rename_privateuse1_backend("npu")
    _libraries.extend(kernels.register())
    _libraries.extend(autocast.register())
    torch._register_device_module("npu", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    backend.register()
    torch.UntypedStorage.resize_ = memory.resize_storage  # type: ignore[method-assign, assignment]
    torch.storage._to = memory.move_storage
    _libraries.append(collectives.register())


def _probe() -> None:
    """Whether the private parts of torch do what they did when this was written.

    Raises:
        SimulatedNpuError: they do not.
    """
    from hyper_parallel.platform.npu_sim import memory

    host = torch.arange(6.0)
    moved = host.to("npu")
    shared = memory.on_host(memory.on_device(host))
    pinned = host.pin_memory()
    found = {
        "device": str(moved.device) == "npu:0" and str((moved + 1).device) == "npu:0",
        "arithmetic": (moved.view(2, 3).t() @ moved.view(2, 3)).cpu().tolist() == [[9, 12, 15], [12, 17, 22], [15, 22, 29]],
        "shared memory": shared.data_ptr() == host.data_ptr(),
        "views": moved[2:].add_(1) is not None and moved.tolist() == [0, 1, 3, 4, 5, 6],
        "pinned memory": pinned.is_pinned() and not host.is_pinned(),
    }
    _wrong.extend(name for name, right in found.items() if not right)
    if _wrong:
        raise SimulatedNpuError(f"the simulated NPU cannot start: {obstacle()}")
