"""Parameters of which several ranks hold copies, each with a part of the gradient: who they are, and whether it is complete.

Both are noted on the tensors themselves, on the parameter with whom it is shared, on the gradient that it was completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.core.mesh import ParallelMesh

_GROUPS = "_hyper_parallel_shared_groups"
_COPIES = "_hyper_parallel_trainable_copies"
_FINISHED = "_hyper_parallel_finished"


_MESH = "_hyper_parallel_mesh"


class UnfinishedGradientsError(RuntimeError):
    """Gradients of shared parameters are still parts: :func:`finish_gradients` was not called after backward."""


def mark_shared(parameter: torch.Tensor, group: dist.ProcessGroup | DeviceMesh) -> None:
    """Declare that the ranks of ``group`` hold copies of one parameter, each with a part of its gradient.

    :func:`finish_gradients` adds the parts up, and the gradient norm counts the parameter once in the group. Used for
    embeddings tied across pipeline stages and for parameters that are replicated over tensor-parallel ranks. A parameter may be
    in several groups (the axes of a mesh), in the same order on every rank. Call it after ``fully_shard``, on every rank of the
    group.

    Args:
        parameter: as the module holds it after sharding.
        group: the ranks that hold it, this one among them; or a mesh of one axis.

    Raises:
        ValueError: a mesh of several axes, or a group that this rank is not in.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"mark_shared needs a mesh of one axis, not of {group.mesh_dim_names or group.ndim}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group that mark_shared was given")
    groups = shared_groups(parameter)
    if group not in groups and dist.get_world_size(group) > 1:
        setattr(parameter, _GROUPS, (*groups, group))
        global _any_marked
        _any_marked = True


def shared_groups(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups that :func:`mark_shared` was given for ``parameter``."""
    return getattr(parameter, _GROUPS, ())


def marks_of(tensors: Sequence[torch.Tensor]) -> list[Any] | None:
    """Who shares what among ``tensors``; None while nothing is shared at all, which is quick to see."""
    return [(getattr(t, _GROUPS, ()), getattr(t, _COPIES, ())) for t in tensors] if _any_marked else None


def copies_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The global ranks with a trainable copy of a shared parameter, as far as this rank shares groups with them."""
    known = getattr(parameter, _COPIES, None)
    return known or tuple(rank for group in shared_groups(parameter) for rank in dist.get_process_group_ranks(group))


def note_copies(parameter: torch.Tensor, ranks: tuple[int, ...]) -> None:
    """Remember which ranks train a copy of ``parameter``."""
    if set(copies_of(parameter)) != set(ranks):
        setattr(parameter, _COPIES, ranks)


_any_marked = False


def is_finished(parameter: torch.Tensor) -> bool:
    """Whether the gradient that ``parameter`` has now went through :func:`finish_gradients` and has not changed since."""
    gradient = gradient_of(parameter)
    return gradient is None or getattr(gradient, _FINISHED, None) == _versions(gradient)


def has_changed(parameter: torch.Tensor) -> bool:
    """Whether ``.grad`` went through :func:`finish_gradients` and was changed in place since. (A ``main_grad`` is a buffer that is
    zeroed in place in every step: for it, this says nothing.)"""
    gradient = gradient_of(parameter)
    noted = getattr(gradient, _FINISHED, None)
    return gradient is not None and gradient is parameter.grad and noted is not None and noted != _versions(gradient)


def _versions(gradient: Any) -> tuple[int, int]:
    """Both change counters: an operation on a DTensor raises its own, FSDP2's accumulation that of the local tensor."""
    return gradient._version, local_of(gradient)._version


def settle(parameter: torch.Tensor) -> None:
    """Note that the gradient of ``parameter`` is complete as it is now. The note is the gradient's: the next step's is another
    tensor, or this one changed."""
    gradient = gradient_of(parameter)
    if gradient is not None:
        setattr(gradient, _FINISHED, _versions(gradient))
        setattr(gradient, _GROUPS, shared_groups(parameter))  # for the norm of gradients without their parameters
        setattr(gradient, _COPIES, copies_of(parameter))


def remember_mesh(stage: torch.nn.Module, mesh: ParallelMesh) -> None:
    """Note that ``stage`` and its parameters are a pipeline's: the other stages do not show in them, and yet belong to the norm."""
    for noted in (stage, *stage.parameters()):
        object.__setattr__(noted, _MESH, mesh)


def remembered_mesh(parameters: Any) -> ParallelMesh | None:
    """The mesh that was noted on a module, or on the first of several modules or parameters."""
    first = parameters[0] if isinstance(parameters, (list, tuple)) and parameters else parameters
    return getattr(first, _MESH, None)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """``main_grad`` where a parameter has one, else ``.grad``."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def local_of(tensor: Any) -> Any:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
