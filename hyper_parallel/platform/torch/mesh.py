"""Process groups and device meshes: how a :class:`ParallelMesh` becomes a ``torch.distributed`` one."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel.core.mesh import AXES, ParallelMesh
from hyper_parallel.platform.torch.loading import load_torch_npu

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
SIMULATED_NPU = "sim-npu"


def torch_device_type(device: str) -> str:
    """The device as torch calls it: the simulated NPU is "npu" there."""
    return "npu" if device == SIMULATED_NPU else device


def init_process_group(
    device: str = "cpu",
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout_seconds: float | None = None,
    strict_dtypes: bool = False,
) -> None:
    """Start the default process group for ``device`` ("cpu", "cuda", "npu" or "sim-npu") with the one backend it is trained on.

    On the CPU every rank computes with one thread: ranks outnumber cores there, and results must not depend on how a rank
    was started. "sim-npu" puts the simulated NPU in place, whose kernels are the CPU's; ``strict_dtypes`` is for it alone.

    Raises:
        ValueError: an unknown device.
        DeviceMissingError: "npu" without torch_npu or CANN.
        SimulatedNpuError: "sim-npu" where it cannot start.
        RuntimeError: from torch, when the ranks cannot meet.
    """
    if device not in (*BACKENDS, SIMULATED_NPU):
        raise ValueError(f"unknown device {device!r}; known: {', '.join((*BACKENDS, SIMULATED_NPU))}")
    if device in ("cpu", SIMULATED_NPU):
        torch.set_num_threads(1)
    if device == SIMULATED_NPU:
        from hyper_parallel.platform.npu_sim import install

        install(strict_dtypes=strict_dtypes)
    elif device == "npu":
        load_torch_npu()
    forget_meshes()
    dist.init_process_group(
        BACKENDS[torch_device_type(device)],
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


_meshes: dict[tuple[ParallelMesh, str, str], tuple[DeviceMesh, dist.ProcessGroup | None]] = {}


def device_mesh(mesh: ParallelMesh, device_type: str | None = None) -> DeviceMesh:
    """The torch device mesh of ``mesh``: its axes of more than one rank, and ``dp_shard`` always, named and ordered as in
    ``core.mesh.AXES``; made once per process group.

    Collective on its first call: every rank must make it.

    Args:
        device_type: "cpu", "cuda" or "npu"; ``None`` is the one that was used last, or the default group's.
    """
    axes = tuple(axis for axis in AXES if axis == "dp_shard" or getattr(mesh, axis) > 1)  # each axis costs groups
    return _made_once(mesh, device_type, "ranks", axes, tuple(getattr(mesh, axis) for axis in axes))


def _made_once(
    mesh: ParallelMesh, device_type: str | None, view: str, axes: tuple[str, ...], sizes: tuple[int, ...]
) -> DeviceMesh:
    world = dist.group.WORLD
    if device_type is None:
        device_type = next((known for (m, _, known), (_, g) in _meshes.items() if m == mesh and g is world), None)
        device_type = device_type or _default_device_type()
    entry = _meshes.get((mesh, view, device_type))
    if entry is None or entry[1] is not world:
        made = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
        entry = _meshes[mesh, view, device_type] = (made, world)
    return entry[0]


def expert_mesh(mesh: ParallelMesh, device_type: str | None = None) -> DeviceMesh:
    """The same ranks as seen by experts: ``dp_shard`` is cut into ``dpm`` (which shards an expert) times ``ep`` (which spreads
    experts); axes of more than one rank, and ``dpm`` and ``ep`` always. Collective on its first call."""
    sizes = {**{axis: getattr(mesh, axis) for axis in AXES}, "dpm": mesh.dp_shard // mesh.ep, "ep": mesh.ep}
    axes = tuple(a for a in ("pp", "dp_replicate", "dpm", "ep", "tp") if a in ("dpm", "ep") or sizes[a] > 1)
    return _made_once(mesh, device_type, "experts", axes, tuple(sizes[axis] for axis in axes))


def data_parallel_mesh(mesh: ParallelMesh, device_type: str | None = None) -> DeviceMesh:
    """The mesh that FSDP2 shards over: ``dp_shard``, and before it ``dp_replicate`` where there are replicas (HSDP)."""
    whole = device_mesh(mesh, device_type)
    return whole["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else whole["dp_shard"]


def _default_device_type() -> str:
    backend = dist.get_backend()
    return next((device for device, name in BACKENDS.items() if name == backend), "cpu")


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must be for the collectives of ``group``, whatever device it lives on (CPU offload)."""
    backend = dist.get_backend(group)
    device = next((device for device, name in BACKENDS.items() if name == backend), "cpu")
    return torch.device(device, torch.get_device_module(device).current_device()) if device != "cpu" else torch.device("cpu")
