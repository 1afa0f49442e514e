"""Apply every kind of parallelism to a model in the one right order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.plan_check import check_plan
from hyper_parallel.core.precision import MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.units import group_layers
from hyper_parallel.platform.torch.fully_shard import fully_shard
from hyper_parallel.platform.torch.mesh import data_parallel_mesh
from hyper_parallel.platform.torch.shared import remember_mesh


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    plan: ParallelPlan,
    policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    device_type: str | None = None,
) -> nn.Module:
    """Prepare ``model``, or one pipeline stage of it, for training on ``mesh``, in place: tensor and sequence parallelism, expert
    parallelism, activation checkpointing, then FSDP or HSDP.

    A single data-parallel rank goes the same way, since ``compute_dtype`` would silently do nothing otherwise.

    Args:
        model: with all parameters initialised, the same on every rank; names as in the whole model. What ``plan`` names and a
            stage does not have is left out.
        plan: which layers there are, how they are grouped, and what is cut where.
        policy: dtypes of storage, compute and reduction.
        offload_policy: keep shards in host memory.
        device_type: "cpu", "cuda" or "npu"; ``None`` is the default process group's.

    Raises:
        LayoutError: (a ValueError) ``plan`` does not fit the model: a name that is not there, a parameter that is cut where nothing
            would add its parts up, and the like.
        ValueError: nothing of ``plan`` is in the model.
    """
    layers, experts = divide(model, mesh, plan, device_type)
    options = {
        "mp_policy": policy,
        "offload_policy": offload_policy,
        "reshard_after_forward": plan.reshard_after_forward,
    }
    itemsize = torch.finfo(getattr(torch, policy.compute_dtype)).bits // 8 if policy else 4
    if experts:
        from hyper_parallel.platform.torch.expert_parallel import expert_shard_mesh, expert_shard_placement

        expert_options = options | {
            "mesh": expert_shard_mesh(mesh, device_type),
            "shard_placement_fn": expert_shard_placement(model, plan),
        }
        _shard_units(experts, [itemsize * _elements(module) for module in experts], plan.unit, expert_options)
    sharded = {parameter for module in experts for parameter in module.parameters()}
    dense_options = options | {"mesh": data_parallel_mesh(mesh, device_type)}
    sizes = [itemsize * _elements(layer, sharded) for layer in layers]
    units = group_layers(sizes, plan.unit, itemsize * _elements(model, sharded) - sum(sizes))
    for unit in units:
        _shard([layers[index] for index in unit], dense_options)
    _shard([model], dense_options)
    if mesh.tp > 1:
        from hyper_parallel.platform.torch.tensor_parallel import mark_partial_gradients

        mark_partial_gradients(model, mesh, plan, device_type)
    if mesh.pp > 1:
        remember_mesh(model, mesh)
    return model


def divide(
    model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, device_type: str | None = None
) -> tuple[list[nn.Module], list[nn.Module]]:
    """All of :func:`parallelize` but the sharding: what decides how a rank computes, and what it sends meanwhile.

    Returns:
        The layers and the modules of experts, in forward order.
    """
    check_plan(plan, mesh, [name for name, _ in model.named_modules()], [name for name, _ in _all_parameters(model)])
    layers = [layer for name in plan.layers if (layer := _submodule(model, name)) is not None]
    if plan.layers and not layers:
        raise ValueError(f"the model has none of the layers of its plan ({plan.layers[0]}, ...)")
    if mesh.tp > 1:
        from hyper_parallel.platform.torch.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, mesh, plan, device_type)
    experts: list[nn.Module] = []
    if plan.experts:
        from hyper_parallel.platform.torch.expert_parallel import apply_expert_parallel

        experts = apply_expert_parallel(model, mesh, plan, device_type)
    if plan.activation_checkpointing:
        for layer in layers:
            _recompute_in_backward(layer)
    return layers, experts


def _recompute_in_backward(module: nn.Module) -> None:
    """Keep of ``module``'s activations its inputs alone; hooks on ``module`` itself run in forward only.

    Torch's composable ``checkpoint`` can recompute once for each forward (2.13: AttributeError in a context manager), and a
    zero-bubble schedule asks twice: for the gradients of inputs, and later for those of weights.
    """
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def recomputed(*arguments: Any, **options: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    module.forward = recomputed


def _shard_units(modules: list[nn.Module], sizes: list[int], unit: str, options: dict[str, Any]) -> None:
    """Every one of ``modules`` in some unit of its own kind, since no root takes the rest."""
    for group in group_layers(sizes, unit) or [list(range(len(modules)))]:
        _shard([modules[index] for index in group], options)


def _shard(modules: Sequence[nn.Module], options: dict[str, Any]) -> None:
    fully_shard(modules if len(modules) > 1 else modules[0], **options)


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _all_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Tied ones under each of their names."""
    return model.named_parameters(remove_duplicate=False)


def _elements(module: nn.Module, without: set[nn.Parameter] | frozenset[nn.Parameter] = frozenset()) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in without)
