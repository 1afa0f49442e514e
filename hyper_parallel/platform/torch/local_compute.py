"""Modules that store DTensors and compute on plain tensors.

A DTensor knows how its parts belong together, which FSDP2, the gradient norm and checkpoints need. In forward it would only
be in the way: each operation on it is dispatched in Python, and decides by itself where and in which dtype to communicate. So a
module sees this rank's part of its parameters while it runs, and communication stands in the few places that mean it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def compute_on_local_parameters(module: nn.Module) -> None:
    """While ``module`` runs forward, its own DTensor parameters appear as this rank's plain tensors.

    The gradient of each comes back as a DTensor with the parameter's placements, so a Replicate parameter's gradient is taken as
    it is on each rank: where it is only this rank's part, :func:`hyper_parallel.mark_shared` must say so.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if names:
        module.register_forward_pre_hook(_Enter(names))
        module.register_forward_hook(_Leave(names), always_call=True)


class _Enter:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        for name in self.names:
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor):  # what the instance's __dict__ holds goes before a parameter
                module.__dict__[name] = parameter.to_local(grad_placements=parameter.placements)


class _Leave:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for name in self.names:
            module.__dict__.pop(name, None)
