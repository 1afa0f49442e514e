"""``fully_shard`` on torch: FSDP2, set so that dtypes, sums and 0-dim parameters are what the library promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDPMixedPrecision
from torch.distributed.fsdp import OffloadPolicy as FSDPOffload
from torch.distributed.fsdp import fully_shard as fsdp_fully_shard
from torch.distributed.tensor import Shard

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.precision import MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.platform.torch.mesh import data_parallel_mesh
from hyper_parallel.platform.torch.shared import local_of

SHARD_DTYPE = torch.float32
"""Shards are the float32 master weights; the all-gather casts them to ``compute_dtype``. Plain FSDP2 over bfloat16 shards
would cast a gradient that was reduced in float32 back to bfloat16."""


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | ParallelMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | None = None,
    comm_fusion: bool = False,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
) -> Any:
    """Shard the parameters of ``module`` (or of several modules as one unit) over ``mesh``, in place.

    Gradients are *summed* over ranks, not averaged: divide the loss by the global number of tokens instead, which is right
    for unequal shares too. A 0-dim parameter is stored as one element and seen 0-dim by the module's forward.

    Args:
        mesh: one axis to shard over (FSDP), two named axes to replicate and shard over (HSDP), or a :class:`ParallelMesh`.
        mp_policy: dtypes; without it, FSDP2's own: everything in the dtypes that the parameters have, and shards too.
        offload_policy: keep shards, their gradients and the optimizer state in host memory.
        reshard_after_forward: free the unsharded parameters between forward and backward; ``None`` is FSDP2's default (true,
            except at the root).
        comm_fusion: MindSpore only; FSDP2 always fuses a unit's collectives.
        shard_placement_fn: the dimension to shard each parameter along; dimension 0 without it, or where it gives None.

    Returns:
        What was passed in.

    Raises:
        ValueError: ``comm_fusion`` on torch.
    """
    if comm_fusion:
        raise ValueError("comm_fusion is a MindSpore option; on torch, FSDP2 always fuses the collectives of a unit")
    if isinstance(mesh, ParallelMesh):
        mesh = data_parallel_mesh(mesh)
    modules = [module] if isinstance(module, nn.Module) else list(module)
    _widen_scalars(modules)
    for part in modules:
        if mp_policy is not None:
            _store_in_shard_dtype(part, mp_policy)
    sharded = fsdp_fully_shard(
        module if isinstance(module, nn.Module) else modules,
        mesh=mesh,
        mp_policy=_fsdp_precision(mp_policy),
        offload_policy=_fsdp_offload(offload_policy, mesh.device_type),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
    )
    for part in modules:
        if isinstance(part, FSDPModule):
            # gloo has no pre-multiplied sum; with a forced SUM a factor of 1 needs none
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return sharded


def _fsdp_precision(policy: MixedPrecisionPolicy | None) -> FSDPMixedPrecision:
    if policy is None:
        return FSDPMixedPrecision()
    compute = getattr(torch, policy.compute_dtype)
    return FSDPMixedPrecision(
        param_dtype=None if compute == SHARD_DTYPE else compute,
        reduce_dtype=getattr(torch, policy.resolved_reduce_dtype),
    )


def _fsdp_offload(policy: OffloadPolicy | None, device_type: str) -> FSDPOffload:
    return FSDPOffload() if policy is None else CPUOffloadPolicy(pin_memory=policy.pins_on(device_type))


@torch.no_grad()
def _store_in_shard_dtype(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Round the parameters to their storage dtype, and hold them in SHARD_DTYPE. Those that a unit inside holds already are not
    moved: with offload they lie on another device than their mesh."""
    storage = getattr(torch, policy.params_dtype)
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dtype != SHARD_DTYPE:
            parameter.data = parameter.data.to(SHARD_DTYPE)
        if storage != SHARD_DTYPE:
            local = local_of(parameter)  # as an operation of DTensors, the rounding would be dispatched in Python
            local.copy_(local.to(storage))


def _widen_scalars(modules: Sequence[nn.Module]) -> None:
    """Give every 0-dim parameter one dimension of size 1, which FSDP2 can shard, and keep it 0-dim for forward.

    FSDP2 puts the unsharded parameter into the module's ``_parameters``; a property on a subclass of the module's class reads
    it from there as 0-dim. A scalar that several modules share stays one parameter.
    """
    widened: dict[nn.Parameter, nn.Parameter] = {}
    for owner in [owner for module in modules for owner in module.modules()]:
        names = [name for name, parameter in owner._parameters.items() if parameter is not None and parameter.ndim == 0]
        for name in names:
            scalar = owner._parameters[name]
            assert scalar is not None
            if scalar not in widened:
                widened[scalar] = nn.Parameter(scalar.data.reshape(1), requires_grad=scalar.requires_grad)
            owner._parameters[name] = widened[scalar]
        if names:
            views = {name: property(_scalar_view(name)) for name in names}
            owner.__class__ = type(type(owner).__name__, (type(owner),), {**views, "__module__": type(owner).__module__})


def _scalar_view(name: str) -> Any:
    def view(owner: nn.Module) -> torch.Tensor:
        parameter = owner._parameters[name]
        assert parameter is not None
        # sharded, some ranks hold no element, so the parameter itself is all there is to give
        return parameter if hasattr(parameter, "placements") else parameter.view(())

    return view
