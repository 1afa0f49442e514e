"""Apply every kind of parallelism to a model in the one right order."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable import checkpoint

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.precision import MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.units import group_layers
from hyper_parallel.platform.torch.fully_shard import fully_shard
from hyper_parallel.platform.torch.mesh import data_parallel_mesh


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    plan: ParallelPlan,
    policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    device_type: str | None = None,
) -> nn.Module:
    """Prepare ``model`` for training on ``mesh``: activation checkpointing, then FSDP or HSDP. In place.

    A single data-parallel rank goes the same way, since ``compute_dtype`` would silently do nothing otherwise.

    Args:
        model: with all parameters initialised, the same on every rank.
        plan: which layers there are and how they are grouped.
        policy: dtypes of storage, compute and reduction.
        offload_policy: keep shards in host memory.
        device_type: "cpu", "cuda" or "npu"; ``None`` is the default process group's.

    Raises:
        NotImplementedError: an axis that this version cannot apply.
        AttributeError: a layer named in ``plan`` that the model does not have.
    """
    for axis in ("pp", "tp", "ep"):
        if getattr(mesh, axis) > 1:
            raise NotImplementedError(f"parallelize does not apply {axis} {getattr(mesh, axis)} yet")
    layers = [model.get_submodule(name) for name in plan.layers]
    if plan.activation_checkpointing:
        for layer in layers:
            checkpoint(layer)
    fsdp_mesh = data_parallel_mesh(mesh, device_type)
    compute_bytes = torch.finfo(getattr(torch, policy.compute_dtype)).bits // 8 if policy else 4
    layer_bytes = [compute_bytes * _elements(layer) for layer in layers]
    rest_bytes = compute_bytes * _elements(model) - sum(layer_bytes)
    for unit in group_layers(layer_bytes, plan.unit, rest_bytes):
        members = [layers[index] for index in unit]
        fully_shard(
            members if len(members) > 1 else members[0],
            mesh=fsdp_mesh,
            mp_policy=policy,
            offload_policy=offload_policy,
            reshard_after_forward=plan.reshard_after_forward,
        )
    fully_shard(
        model,
        mesh=fsdp_mesh,
        mp_policy=policy,
        offload_policy=offload_policy,
        reshard_after_forward=plan.reshard_after_forward,
    )
    return model


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
