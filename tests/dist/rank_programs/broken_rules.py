"""One rule of the library reverted at a time, on the ranks that call it."""

from __future__ import annotations

from typing import Any

import torch

from hpcli.faults.fault import replace
from hpcli.faults.registry import plant


def none_to_the_default_dtype() -> None:
    plant("reduce-dtype-none-means-float32")


def none_to_the_default_dtype_in_mindspore() -> None:
    plant("issue-217")


def scalar_left_on_the_cpu() -> None:
    from hyper_parallel.platform.torch.grad_norm import scope

    replace(scope, "_communication_device", lambda device_type: torch.device("cpu"))


def coefficient_not_cast() -> None:
    from hyper_parallel.platform.torch.grad_norm import arrangement

    def moved_only(tensor: Any, value: float) -> torch.Tensor:
        return torch.tensor(value, device=tensor.device)

    replace(arrangement, "_scalar_like", moved_only)


def local_norm_returned() -> None:
    plant("local-norm-returned")


def replicated_counted_by_all() -> None:
    plant("replicated-counted-by-all")
