"""Which ranks belong together on which axis, and what kind of link they talk over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.mesh import AXES, ParallelMesh

SHARED = {
    "pp": "each some of the layers",
    "dp_replicate": "the same shards",
    "dp_shard": "shards of the model and its state",
    "dpm": "shards of the same experts",
    "ep": "each some of the experts",
    "tp": "parts of every matrix",
}


def example_group(mesh: ParallelMesh, axis: str, rank: int) -> list[int]:
    """The ranks of the group on ``axis`` that ``rank`` is in; ``dpm`` and ``ep`` are what experts make of ``dp_shard``, ``all`` is
    everyone."""
    if axis == "all":
        return list(range(mesh.world_size))
    at = mesh.coordinates(rank)
    if axis in AXES:
        return [mesh.rank_at(**{**at, axis: index}) for index in range(getattr(mesh, axis))]
    outer, inner = divmod(at["dp_shard"], mesh.ep)
    if axis == "ep":
        positions = [outer * mesh.ep + index for index in range(mesh.ep)]
    else:
        positions = [index * mesh.ep + inner for index in range(mesh.dp_shard // mesh.ep)]
    return [mesh.rank_at(**{**at, "dp_shard": position}) for position in positions]


def link(group: Sequence[int], ranks_per_host: int) -> str:
    """Over what a group talks: all its ranks on one host, or not. Hosts take ranks in their order."""
    return "within a host" if group[0] // ranks_per_host == group[-1] // ranks_per_host else "between hosts"


def axes(mesh: ParallelMesh, ranks_per_host: int) -> list[dict[str, Any]]:
    """Every axis of more than one rank: how many groups, one of them, and what its ranks share."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES} | {"dpm": mesh.dp_shard // mesh.ep, "ep": mesh.ep}
    found = []
    for axis in ("pp", "dp_replicate", "dp_shard", *(("dpm", "ep") if mesh.ep > 1 else ()), "tp"):
        if sizes[axis] == 1:
            continue
        group = example_group(mesh, axis, 0)
        found.append(
            {
                "axis": axis,
                "ranks": sizes[axis],
                "groups": mesh.world_size // sizes[axis],
                "first": group[:64],
                "link": link(group, ranks_per_host),
                "shares": SHARED[axis],
            }
        )
    return found


def drawing(mesh: ParallelMesh) -> list[str]:
    """The ranks of a small mesh in rows and columns: tensor-parallel neighbours side by side, pipeline ranks and replicas below each
    other."""
    width = len(str(mesh.world_size - 1))
    lines = []
    for pp in range(mesh.pp):
        for replica in range(mesh.dp_replicate):
            blocks = [
                " ".join(f"{mesh.rank_at(pp=pp, dp_replicate=replica, dp_shard=s, tp=t):>{width}}" for t in range(mesh.tp))
                for s in range(mesh.dp_shard)
            ]
            head = f"pp {pp}  " * (mesh.pp > 1) + f"replica {replica}  " * (mesh.dp_replicate > 1)
            lines.append(f"{head}[{'] ['.join(blocks)}]")
    return lines
