"""The backend "hccl" of the simulated device: gloo, registered for ``npu`` tensors alone.

A process group made with it knows no CPU backend, so a CPU tensor meets c10d's own error. For ``npu`` tensors, c10d's
operations get kernels that lend the tensors' memory to the CPU and call the same operation on a second process group, which
holds the same gloo backend under the device "cpu". Torch allows no backend written in Python (2.13: "No constructor defined").
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.npu_sim import strict
from hyper_parallel.platform.npu_sim.memory import on_host

BACKEND = "hccl"
# Names of c10d's operations, and whether they compute.
_OPERATIONS = {
    "allgather_": False,
    "_allgather_base_": False,
    "allgather_coalesced_": False,
    "allgather_into_tensor_coalesced_": False,
    "allreduce_": True,
    "allreduce_coalesced_": True,
    "alltoall_": False,
    "alltoall_base_": False,
    "barrier": False,
    "broadcast_": False,
    "gather_": False,
    "recv_": False,
    "recv_any_source_": False,
    "reduce_": True,
    "reduce_scatter_": True,
    "_reduce_scatter_base_": True,
    "reduce_scatter_tensor_coalesced_": True,
    "scatter_": False,
    "send": False,
}
_CPU = torch.device("cpu")
_GLOO = dist.ProcessGroup.BackendType.GLOO

_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def register() -> torch.library.Library:
    """Make "hccl" known to torch.distributed, and give c10d's operations their kernels for ``npu`` tensors."""
    dist.Backend.register_backend(BACKEND, _gloo, devices=["npu"])
    # each process has one device, so there is none to choose; with `device_id`, torch would want to split groups, gloo cannot
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # c10d's own kernels for this key look for a backend written in C++
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel", category=UserWarning)
        for name, reduces in _OPERATIONS.items():
            kernel = _kernel(getattr(torch.ops.c10d, name).default, reduces)
            library.impl(name, kernel, "PrivateUse1", allow_override=True)
    return library


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _kernel(operation: Any, reduces: bool) -> Callable[..., Any]:
    """What runs in place of ``operation`` on ``npu`` tensors."""
    arguments = operation._schema.arguments
    group_at = next(i for i, argument in enumerate(arguments) if argument.name == "process_group")
    # Results come back as the tensors that were passed in; at first place in the schema is what is written.
    returns_tensors = len(operation._schema.returns) > 1

    def run(*passed: Any, **named: Any) -> Any:
        if reduces and strict.enabled:
            strict.check_reduction(passed)
        lent = [_lent(argument) for argument in passed]
        lent[group_at] = _on_host(passed[group_at])
        result = operation(*lent, **named)
        return (passed[0], result[-1]) if returns_tensors else result

    return run


def _lent(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return on_host(argument) if argument.device.type == "npu" else argument
    if isinstance(argument, (list, tuple)):
        return [_lent(entry) for entry in argument]
    return argument


def _on_host(boxed: Any) -> Any:
    """The process group that holds the backend of this one under the device "cpu"; made once."""
    group = dist.ProcessGroup.unbox(boxed)
    host = _hosts.get(group)
    if host is None:
        made = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
        made._register_backend(_CPU, _GLOO, group._get_backend(torch.device("npu")))
        host = _hosts[group] = made.boxed()
    return host
