"""Modules that store DTensors and compute on plain tensors.

A DTensor knows how its parts belong together, which FSDP2, the gradient norm and checkpoints need. In forward it would only
be in the way: each operation on it is dispatched in Python, and decides by itself where and in which dtype to communicate. So a
module sees this rank's part of its parameters while it runs, and communication stands in the few places that mean it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def compute_on_local_parameters(module: nn.Module) -> None:
    """While ``module`` runs forward, its own DTensor parameters appear as this rank's plain tensors.

    The gradient of each comes back as a DTensor with the parameter's placements, so a Replicate parameter's gradient is taken as
    it is on each rank: where it is only this rank's part, :func:`hyper_parallel.mark_shared` must say so.

    It wraps ``module.forward``, and so belongs before whatever runs that again in backward; hooks would not be run again there.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if not names:
        return
    forward = module.forward

    @wraps(forward)
    def on_local_parameters(*arguments: Any, **options: Any) -> Any:
        for name in names:
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor):  # what the instance's __dict__ holds goes before a parameter
                module.__dict__[name] = parameter.to_local(grad_placements=parameter.placements)
        try:
            return forward(*arguments, **options)
        finally:
            for name in names:
                module.__dict__.pop(name, None)

    module.forward = on_local_parameters
