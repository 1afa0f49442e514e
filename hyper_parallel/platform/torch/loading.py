"""Importing torch where torch_npu is installed, and torch_npu where CANN may be missing.

``import torch`` imports every installed device extension. Where torch_npu is installed without CANN (Ascend's driver and
libraries), that fails, and torch cannot be imported a second time in the same process: so it is imported without extensions
first, and torch_npu only for those who ask for the device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_CANN = "https://www.hiascend.com/cann"


class DeviceMissingError(RuntimeError):
    """What a device needs is not installed or does not load."""


def import_torch() -> None:
    """Import torch without its device extensions; the environment stays as it is.

    Raises:
        ImportError: torch is not installed, or broken.
    """
    with _no_autoload():
        import torch  # noqa: F401


def load_torch_npu() -> None:
    """Load torch_npu, the device "npu" of torch.

    Raises:
        DeviceMissingError: torch_npu or CANN is missing, or there is no device; the message says what to install.
    """
    import_torch()
    import torch

    if find_spec("torch_npu") is None:
        raise DeviceMissingError(
            f"device npu needs torch_npu: install CANN ({_CANN}), then pip install 'hyper-parallel[npu]'; "
            "sim-npu is a simulated one that needs neither"
        )
    with _no_autoload():  # a failed import leaves its own setting behind
        try:
            import torch_npu  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            cause = str(error).strip().partition("\n")[0]
            raise DeviceMissingError(
                f"device npu: torch_npu is installed but does not load ({cause}). Install CANN ({_CANN}) and source its "
                "set_env.sh; sim-npu is a simulated device that needs neither"
            ) from error
    if not torch.get_device_module("npu").is_available():
        raise DeviceMissingError("device npu: torch_npu loads, but finds no device; `npu-smi info` shows what the driver sees")


@contextlib.contextmanager
def _no_autoload() -> Iterator[None]:
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = before
