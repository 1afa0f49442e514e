"""Process groups and device meshes: how a :class:`ParallelMesh` becomes a ``torch.distributed`` one."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel.core.mesh import AXES, ParallelMesh

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def init_process_group(
    device: str = "cpu",
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout_seconds: float | None = None,
) -> None:
    """Start the default process group for ``device`` ("cpu", "cuda" or "npu") with the one backend it is trained on.

    On the CPU every rank computes with one thread: ranks outnumber cores there, and results must not depend on how a rank
    was started.

    Raises:
        ValueError: an unknown device.
        RuntimeError: from torch, when the ranks cannot meet.
    """
    if device not in BACKENDS:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(BACKENDS)}")
    if device == "cpu":
        torch.set_num_threads(1)
    forget_meshes()
    dist.init_process_group(
        BACKENDS[device],
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=None if timeout_seconds is None else timedelta(seconds=timeout_seconds),
    )


def forget_meshes() -> None:
    """Drop what torch and this module remember of meshes of an earlier process group.

    Torch 2.13 caches the layouts that DTensor operations give, and finds them again by the mesh's ranks alone: a process that
    was another rank then (or was forked from one) would get a mesh on which it believes to be that rank.
    """
    _meshes.clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


_meshes: dict[tuple[ParallelMesh, str], tuple[DeviceMesh, dist.ProcessGroup | None]] = {}


def device_mesh(mesh: ParallelMesh, device_type: str | None = None) -> DeviceMesh:
    """The torch device mesh of ``mesh``: its axes of more than one rank, and ``dp_shard`` always, named and ordered as in
    ``core.mesh.AXES``; made once per process group.

    Collective on its first call: every rank must make it.

    Args:
        device_type: "cpu", "cuda" or "npu"; ``None`` is the one that was used last, or the default group's.
    """
    world = dist.group.WORLD
    if device_type is None:
        device_type = next((known for (m, known), (_, group) in _meshes.items() if m == mesh and group is world), None)
        device_type = device_type or _default_device_type()
    entry = _meshes.get((mesh, device_type))
    if entry is None or entry[1] is not world:
        axes = tuple(axis for axis in AXES if axis == "dp_shard" or getattr(mesh, axis) > 1)  # each axis costs groups
        made = init_device_mesh(device_type, tuple(getattr(mesh, axis) for axis in axes), mesh_dim_names=axes)
        entry = _meshes[mesh, device_type] = (made, world)
    return entry[0]


def data_parallel_mesh(mesh: ParallelMesh, device_type: str | None = None) -> DeviceMesh:
    """The mesh that FSDP2 shards over: ``dp_shard``, and before it ``dp_replicate`` where there are replicas (HSDP)."""
    whole = device_mesh(mesh, device_type)
    return whole["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else whole["dp_shard"]


def _default_device_type() -> str:
    backend = dist.get_backend()
    return next((device for device, name in BACKENDS.items() if name == backend), "cpu")
