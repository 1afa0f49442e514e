"""The last step of backward: gradients of which several ranks hold a part are added up.

FSDP2 reduces gradients over the data-parallel ranks. What is left are parameters that other ranks hold too, each with its own
part of the gradient: replicated over tensor-parallel ranks that saw different tokens or computed different heads, or tied
across pipeline stages. They are added up here, all in one all-reduce per group and in float32, whatever
dtype the rest is reduced in (in the layer, each would be an all-reduce of its own per micro-batch, in the compute
dtype: pytorch#190626).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hyper_parallel.platform.torch.mesh import communication_device

Parameters: TypeAlias = torch.nn.Module | torch.Tensor | Iterable[Any]

_GROUPS = "_hyper_parallel_shared_groups"
_FINISHED = "_hyper_parallel_finished"


class UnfinishedGradientsError(RuntimeError):
    """Gradients of shared parameters are still parts: :func:`finish_gradients` was not called after backward."""


def mark_shared(parameter: torch.Tensor, group: dist.ProcessGroup | DeviceMesh) -> None:
    """Declare that the ranks of ``group`` hold copies of one parameter, each with a part of its gradient.

    :func:`finish_gradients` adds the parts up, and the gradient norm counts the parameter once in the group. Used for
    embeddings tied across pipeline stages and for parameters that are replicated over tensor-parallel ranks. A parameter may be
    in several groups. Call it after ``fully_shard``, on every rank of the group.

    Args:
        parameter: as the module holds it after sharding.
        group: the ranks that hold it, this one among them; or a mesh of one axis.

    Raises:
        ValueError: a mesh of several axes.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"mark_shared needs a mesh of one axis, not of {group.mesh_dim_names or group.ndim}")
        group = group.get_group()
    groups = shared_groups(parameter)
    if group not in groups:
        setattr(parameter, _GROUPS, (*groups, group))


def shared_groups(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups that :func:`mark_shared` was given for ``parameter``."""
    return getattr(parameter, _GROUPS, ())


def is_finished(parameter: torch.Tensor) -> bool:
    """Whether the gradient that ``parameter`` has now went through :func:`finish_gradients` and was not added to since."""
    gradient = _gradient(parameter)
    return gradient is None or getattr(gradient, _FINISHED, None) == _local(gradient)._version


def finish_gradients(parameters: Parameters, mesh: Any = None) -> None:
    """Complete the gradients after backward: add up those of which other ranks hold a part, in place.

    One all-reduce per group of ranks, in float32 (float64 stays), ``main_grad`` before ``.grad``. The result is the same bits on
    every rank of the group. A copy without gradient counts as zeros and gets the sum; where no copy has one, none gets one.
    Gradients with a Partial placement become Replicate. A gradient that is complete already is not added up again. Since
    gradients are summed over ranks here and never averaged, those of experts need no factor of their own.

    Args:
        parameters: a module, several modules, or parameters; the same on every rank of each group.
        mesh: accepted for symmetry with :func:`clip_grad_norm_`; the groups follow from the parameters.
    """
    with torch.no_grad():
        listed = [p for p in listed_parameters(parameters) if p.requires_grad]
        by_group: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[torch.Tensor]]] = {}
        for parameter in listed:
            for group in _unfinished_groups(parameter):
                ranks = tuple(dist.get_process_group_ranks(group))
                by_group.setdefault(ranks, (group, []))[1].append(parameter)
        for ranks in sorted(by_group):  # one order on all ranks: groups may overlap
            _add_up(*by_group[ranks])
        for _, members in by_group.values():
            for parameter in members:
                settle(parameter)


def listed_parameters(parameters: Parameters) -> list[torch.Tensor]:
    """The tensors of a module, of several, of one tensor or of an iterable; each once."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    found: dict[int, torch.Tensor] = {}
    for entry in parameters:
        for tensor in entry.parameters() if isinstance(entry, torch.nn.Module) else (entry,):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


class _Slot(NamedTuple):
    parameter: torch.Tensor
    gradient: torch.Tensor | None  # this rank's part, plain


def _unfinished_groups(parameter: torch.Tensor) -> Sequence[dist.ProcessGroup]:
    gradient = _gradient(parameter)
    groups = () if gradient is not None and is_finished(parameter) else shared_groups(parameter)
    if isinstance(gradient, DTensor):
        partial = [axis for axis, placement in enumerate(gradient.placements) if placement.is_partial()]
        groups = (*groups, *(gradient.device_mesh.get_group(axis) for axis in partial))
    return groups


def _add_up(group: dist.ProcessGroup, parameters: list[torch.Tensor]) -> None:
    slots = [_Slot(parameter, _local(_gradient(parameter))) for parameter in parameters]
    wide = torch.float64 if any(g is not None and g.dtype == torch.float64 for _, g in slots) else torch.float32
    device = communication_device(group)
    sizes = [_local(parameter).numel() for parameter in parameters]
    buffer = torch.zeros(sum(sizes) + len(slots), dtype=wide, device=device)
    parts = buffer[: sum(sizes)].split(sizes)
    there = buffer[sum(sizes) :]
    for index, (slot, part) in enumerate(zip(slots, parts, strict=True)):
        if slot.gradient is not None:
            part.copy_(slot.gradient.reshape(-1))
            there[index] = 1.0
    dist.all_reduce(buffer, group=group)
    for present, slot, part in zip(there.tolist(), slots, parts, strict=True):
        if slot.gradient is not None:
            slot.gradient.copy_(part.view(slot.gradient.shape))
        elif present:
            _give(slot.parameter, part)


def _give(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """A gradient for a parameter that has none here."""
    gradient = torch.empty_like(parameter)
    local = _local(gradient)
    local.copy_(values.view(local.shape))
    parameter.grad = gradient


def settle(parameter: torch.Tensor) -> None:
    """Note that the gradient of ``parameter`` is complete as it is now (after every change in place)."""
    gradient = _gradient(parameter)
    if gradient is None:
        return
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        whole = DTensor.from_local(
            gradient._local_tensor,
            gradient.device_mesh,
            placements,
            run_check=False,
            shape=gradient.shape,
            stride=gradient.stride(),
        )
        if getattr(parameter, "main_grad", None) is gradient:
            parameter.main_grad = whole  # type: ignore[attr-defined]
        else:
            parameter.grad = whole
        gradient = whole
    setattr(gradient, _FINISHED, _local(gradient)._version)  # on the gradient itself: the next step's is another tensor


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
