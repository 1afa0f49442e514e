"""Every kind of parallelism on one MindSpore model, in the one right order: tensor and sequence, experts, sharding, recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.precision import ITEM_SIZES, MixedPrecisionPolicy, OffloadPolicy, dtype_name
from hyper_parallel.core.units import group_layers
from hyper_parallel.platform.mindspore.expert_parallel import apply_expert_parallel, expert_shard_dims
from hyper_parallel.platform.mindspore.fully_shard import fully_shard
from hyper_parallel.platform.mindspore.recompute import recompute_in_backward
from hyper_parallel.platform.mindspore.tensor_parallel import apply_tensor_parallel


def parallelize(
    model: ms.nn.Cell,
    mesh: ParallelMesh,
    plan: ParallelPlan,
    policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    comm_fusion: bool = False,
) -> ms.nn.Cell:
    """Prepare ``model``, or one pipeline stage of it, for training on ``mesh``, in place, and return it.

    Args:
        model: with all parameters initialised, the same on every rank; names as in the whole model. What ``plan`` names and a
            stage does not have is left out.
        plan: which layers there are, how they are grouped, and what is cut where.
        policy: dtypes of storage, compute and reduction; ``None`` leaves everything in the dtypes that the parameters have.
        offload_policy: keep shards and their gradients in host memory.
        comm_fusion: reduce-scatter a unit's gradients at once instead of one by one.

    Raises:
        ValueError: nothing of ``plan`` is in the model.
    """
    cells = dict(model.cells_and_names())
    layers = [cells[name] for name in plan.layers if name in cells]
    if plan.layers and not layers:
        raise ValueError(f"the model has none of the layers of its plan ({plan.layers[0]}, ...)")
    if mesh.tp > 1:
        apply_tensor_parallel(model, mesh, plan)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": offload_policy,
        "reshard_after_forward": plan.reshard_after_forward,
        "comm_fusion": comm_fusion,
    }
    experts = apply_expert_parallel(model, mesh, plan) if plan.experts else []
    expert_options = options | {"experts": True, "shard_dim": expert_shard_dims(model, plan)}
    expert_sizes = [_bytes(cell, policy) for cell in experts]
    for unit in group_layers(expert_sizes, plan.unit) or [list(range(len(experts)))]:
        if unit:
            fully_shard([experts[index] for index in unit], **expert_options)
    taken = {id(parameter) for cell in experts for parameter in cell.get_parameters()}
    sizes = [_bytes(layer, policy, taken) for layer in layers]
    units = group_layers(sizes, plan.unit, _bytes(model, policy, taken) - sum(sizes))
    if plan.activation_checkpointing and layers and not units:
        units = [list(range(len(layers)))]  # a layer that is computed again in backward must make its own parameters whole
    for unit in units:
        fully_shard([layers[index] for index in unit], **options)
    fully_shard(model, **options)
    if plan.activation_checkpointing:
        for layer in layers:
            recompute_in_backward(layer)
    return model


def _bytes(cell: ms.nn.Cell, policy: MixedPrecisionPolicy | None, without: Iterable[int] = ()) -> int:
    """Unsharded size of the parameters in ``cell``."""
    own = [parameter for parameter in cell.get_parameters() if id(parameter) not in without]
    return sum(p.size * ITEM_SIZES[policy.compute_dtype if policy else dtype_name(p.dtype)] for p in own)
