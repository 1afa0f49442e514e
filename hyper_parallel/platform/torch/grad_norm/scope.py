"""Which ranks make up one norm, and which of them hold the same piece of a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


class Holding(NamedTuple):
    """How the piece of a tensor that this rank holds relates to the other ranks.

    Attributes:
        replicas: global ranks that hold the same piece, ascending, this one among them.
        counts: this rank counts the piece when every replica has it.
    """

    replicas: tuple[int, ...]
    counts: bool


class Scope(NamedTuple):
    """The ranks whose gradients make up one norm. ``group`` is None where this process stands alone."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    device: torch.device


def describe(tensor: torch.Tensor) -> str:
    """Shape and layout of a parameter in words: equal on every rank that holds the same list."""
    if isinstance(tensor, DTensor):
        return f"{tuple(tensor.shape)} {tensor.placements} on {mesh_ranks(tensor.device_mesh)}"
    return f"{tuple(tensor.shape)} on every rank"


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
    """The ranks that hold this rank's piece: those that differ from it on replicated axes alone (or on axes that
    are still to be summed over). What lies on a part of the
    ``peers`` is replicated over the rest of them, as a plain tensor is."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    chosen = tuple(
        slice(None) if isinstance(placement, Replicate) or placement.is_partial() else position
        for placement, position in zip(placements, coordinate, strict=True)
    )
    here = set(mesh.mesh[chosen].flatten().tolist())
    return tuple(sorted(here | _same_place_elsewhere(mesh, chosen, peers)))


def _same_place_elsewhere(mesh: DeviceMesh, chosen: tuple[Any, ...], peers: tuple[int, ...]) -> set[int]:
    """The ranks among ``peers`` outside ``mesh`` that hold the same piece: ``mesh`` is one of several that are cut alike out of one
    mesh of all peers."""
    if set(mesh_ranks(mesh)) >= set(peers):
        return set()
    root = mesh._get_root_mesh()
    names = mesh.mesh_dim_names or ()
    root_names = root.mesh_dim_names or ()
    position = root.get_coordinate()
    if position is None or not set(names) <= set(root_names):
        return set()
    by_name = dict(zip(names, chosen, strict=True))
    inside = set(peers)
    fixed = tuple(by_name.get(name, slice(None)) for name in root_names)
    return {rank for rank in root.mesh[fixed].flatten().tolist() if rank in inside}


def scope_of(tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Scope:
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}
    if mesh is None:
        if not meshes:
            return Scope(None, (dist.get_rank() if dist.is_initialized() else 0,), torch.device("cpu"))
        mesh = _spanning(list(meshes.values()))
    ranks = mesh_ranks(mesh)
    for lain_on in map(mesh_ranks, meshes.values()):
        if not set(lain_on) <= set(ranks):
            raise ValueError(
                f"parameters lie on ranks {lain_on}, but mesh= spans only ranks {ranks}; "
                "pass a mesh of all ranks that share the model"
            )
    return Scope(_group(mesh, ranks), ranks, _communication_device(mesh.device_type))


def _spanning(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The smallest mesh over the ranks of all ``meshes``: one of them, or a part of the mesh that they were all cut from."""
    union = set().union(*(mesh_ranks(candidate) for candidate in meshes))
    whole = [candidate for candidate in meshes if len(mesh_ranks(candidate)) == len(union)]
    if whole:
        return min(whole, key=lambda candidate: candidate.ndim)
    roots = {id(root): root for root in (candidate._get_root_mesh() for candidate in meshes)}
    if len(roots) == 1:
        root = next(iter(roots.values()))
        used = {name for candidate in meshes for name in candidate.mesh_dim_names or ()}
        axes = tuple(name for name in root.mesh_dim_names or () if name in used)
        if len(axes) == root.ndim:
            return root
        if axes and used <= set(axes):
            return root[axes]
    spans = sorted({mesh_ranks(candidate) for candidate in meshes})
    raise ValueError(
        f"parameters lie on meshes of different ranks ({'; '.join(map(str, spans))}) that were not cut from one mesh; "
        "pass mesh=, a mesh that spans them all"
    )


def _group(mesh: DeviceMesh, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
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
