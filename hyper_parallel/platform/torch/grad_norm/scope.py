"""Which ranks make up one norm, and which of them hold the same piece of a tensor."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hyper_parallel.platform.torch.shared import shared_groups


class Holding(NamedTuple):
    """How the piece of a tensor that this rank holds relates to the other ranks.

    Attributes:
        replicas: global ranks that hold the same piece, ascending, this one among them.
        counts: this rank counts the piece when every replica has it.
        leads: no rank outside ``replicas`` that has a copy of the parameter goes before this one.
    """

    replicas: tuple[int, ...]
    counts: bool
    leads: bool = True


class Scope(NamedTuple):
    """The ranks whose gradients make up one norm. ``group`` is None where this process stands alone."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    device: torch.device


def describe(tensor: torch.Tensor) -> str:
    """Shape and layout of a parameter in words: equal on every rank that holds the same list."""
    shared = "".join(f", shared by {dist.get_world_size(group)} ranks" for group in shared_groups(tensor))
    if not isinstance(tensor, DTensor):
        return f"{tuple(tensor.shape)} on every rank{shared}"
    mesh = tensor.device_mesh  # not its ranks: another rank may have another part of the same root
    axes = ", ".join(f"{name}={size}" for name, size in zip(_axis_names(mesh), mesh.shape, strict=True))
    return f"{tuple(tensor.shape)} {tensor.placements} on a mesh of {axes}{shared}"


def _axis_names(mesh: DeviceMesh) -> Sequence[str]:
    return mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]


_mesh_ranks_known: dict[int, tuple[weakref.ref[DeviceMesh], tuple[int, ...]]] = {}


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, ascending; remembered, since a list may name one mesh thousands of times."""
    known = _mesh_ranks_known.get(id(mesh))
    if known is None or known[0]() is not mesh:
        known = (weakref.ref(mesh), tuple(sorted(mesh.mesh.flatten().tolist())))
        _mesh_ranks_known[id(mesh)] = known
    return known[1]


def lowest_is_this_rank(ranks: tuple[int, ...]) -> bool:
    return len(ranks) <= 1 or ranks[0] == dist.get_rank()


def replicas_of(mesh: DeviceMesh, placements: Sequence[Any], peers: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks among ``peers`` that hold this rank's piece.

    They differ from it on replicated axes alone, or on axes that are still to be summed over. Where the mesh was cut out of a
    larger one, what lies on one part of that is replicated over the other parts, as a plain tensor is.

    Raises:
        ValueError: some peers lie outside the mesh, and it was not cut out of a mesh of all of them, so that nobody can tell
            which piece they hold.
    """
    root = mesh._get_root_mesh()
    ranks = root._rank_map.numpy()
    if not set(peers) <= set(ranks.tolist()):
        raise ValueError(
            f"a parameter lies on a mesh of ranks {mesh_ranks(mesh)}, and the norm is that of ranks {peers}: what the others hold "
            "does not follow from it; cut the parameter's mesh out of one mesh of all these ranks"
        )
    places = np.arange(len(ranks))
    same = np.ones(len(ranks), bool)
    here = int(np.flatnonzero(ranks == dist.get_rank())[0])
    for axis, placement in zip(mesh._layout, placements, strict=True):
        if not (isinstance(placement, Replicate) or placement.is_partial()):
            for size, stride in axis.sizes_and_strides:
                along = places // stride % size
                same &= along == along[here]
    return tuple(sorted(set(ranks[same].tolist()) & set(peers)))


def scope_of(tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Scope:
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}
    if mesh is None:
        if not meshes:
            return Scope(None, (dist.get_rank() if dist.is_initialized() else 0,), torch.device("cpu"))
        mesh = _spanning(list(meshes.values()))
    ranks = mesh_ranks(mesh)
    return Scope(_group(mesh, ranks), ranks, _communication_device(mesh.device_type))


def require_within(scope: Scope, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse parameters that lie on ranks outside the scope."""
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}
    for lain_on in map(mesh_ranks, meshes.values()):
        if not set(lain_on) <= set(scope.ranks):
            raise ValueError(
                f"parameters lie on ranks {lain_on}, but mesh= spans only ranks {scope.ranks}; "
                "pass a mesh of all ranks that share the model"
            )


def _spanning(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The smallest mesh over the ranks of all ``meshes``: one of them, or a part of the mesh that they were all cut from."""
    union = set().union(*(mesh_ranks(candidate) for candidate in meshes))
    whole = [candidate for candidate in meshes if len(mesh_ranks(candidate)) == len(union)]
    if whole:
        return min(whole, key=lambda candidate: candidate.ndim)
    roots = [candidate._get_root_mesh() for candidate in meshes]
    # compared by their ranks: torch's cache of layouts hands out equal meshes that were cut from another root over the same ranks
    if len({tuple(root._rank_map.tolist()) for root in roots}) == 1:
        extents = [(math.prod(root.shape[axis] for axis in _axes_in_use(root, meshes)), root) for root in roots]
        root = min(extents, key=lambda extent: extent[0])[1]
        axes = _axes_in_use(root, meshes)
        if len(axes) == root.ndim:
            return root
        if root.mesh_dim_names:
            return root[tuple(root.mesh_dim_names[axis] for axis in axes)]
    spans = sorted({mesh_ranks(candidate) for candidate in meshes})
    raise ValueError(
        f"parameters lie on meshes of different ranks ({'; '.join(map(str, spans))}) that were not cut from one mesh; "
        "pass mesh=, a mesh that spans them all"
    )


def _axes_in_use(root: DeviceMesh, meshes: Sequence[DeviceMesh]) -> list[int]:
    """The axes of ``root`` along which some of ``meshes``, cut out of it, flattened or not, extend."""
    spans = [(stride, stride * size) for m in meshes for axis in m._layout for size, stride in axis.sizes_and_strides]
    own = [[(stride, stride * size) for size, stride in axis.sizes_and_strides] for axis in root._layout]
    return [k for k, axis in enumerate(own) if any(a < d and c < b for a, b in axis for c, d in spans)]


def _group(mesh: DeviceMesh, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} takes part in a norm over ranks {ranks} only")
    if len(ranks) == 1:
        return None
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(f"the mesh of ranks {ranks} needs names for its axes (mesh_dim_names) to get a group of all its ranks")
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _communication_device(device_type: str) -> torch.device:
    """Where a tensor must be for the group's collectives, whatever device the gradients live on (CPU offload)."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def peers_of(scope: Scope, mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The ranks that must hold the same list: all of the scope, or those of this rank's pipeline stage."""
    names = mesh.mesh_dim_names if mesh is not None else None
    if mesh is None or not names or "pp" not in names or mesh.get_coordinate() is None:
        return scope.ranks
    axis = names.index("pp")
    stage = mesh.mesh.select(axis, mesh.get_coordinate()[axis])  # type: ignore[index]
    return tuple(sorted(stage.flatten().tolist()))
