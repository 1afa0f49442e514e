"""Process groups for MindSpore: how a :class:`ParallelMesh` becomes groups of ranks, and what must happen before the first operation."""

from __future__ import annotations

import mindspore as ms

from hyper_parallel.core.mesh import AXES, ParallelMesh
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.collectives import Group

DEVICES = {"cpu": "CPU", "npu": "Ascend"}


def init_process_group(
    device: str = "cpu",
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout_seconds: float | None = None,
    strict_dtypes: bool = False,
) -> None:
    """Set MindSpore up and start the default process group: gloo on a "cpu", HCCL on an "npu" (Ascend).

    On a CPU operations are launched one by one: MindSpore's asynchronous launch takes 20 to 40 times as long there, and lets other
    libraries see memory before it is written. This only takes effect before the first operation of the process.

    Raises:
        ValueError: an unknown device.
        RuntimeError: the ranks cannot meet.
    """
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r} for MindSpore; known: {', '.join(DEVICES)}")
    ms.set_device(DEVICES[device])
    if device == "cpu":
        import torch

        torch.set_num_threads(1)  # ranks outnumber cores, and results must not depend on how a rank was started
        ms.runtime.launch_blocking()
    forget_groups()
    collectives.start(init_method=init_method, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds)


def forget_groups() -> None:
    """Drop the groups of an earlier process group."""
    _groups.clear()
    _prepared.clear()


_groups: dict[tuple[tuple[int, ...], ...], tuple[Group, object]] = {}
_prepared: dict[ParallelMesh, object] = {}
_IN_USE = (
    ("dp_shard",),
    ("dp_replicate",),
    ("tp",),
    ("dp_replicate", "tp"),
    ("dp_replicate", "dp_shard", "tp"),
    ("pp",),
    AXES,
)


def group(mesh: ParallelMesh, *axes: str) -> Group:
    """The ranks that differ from this one on ``axes`` alone; made once per process group.

    Collective on the first call for a mesh: the groups that this package uses are then made, all in one order, since stages of a
    pipeline need them in different orders or not at all. Other combinations of axes are made, collectively, when first asked for.
    """
    _prepare(mesh)
    return _made_once(mesh.groups(*axes))


def expert_shard_group(mesh: ParallelMesh) -> Group:
    """The ranks that shard one expert: ``dp_shard`` is cut into ``dpm`` of them times ``ep``. Collective as :func:`group`."""
    _prepare(mesh)
    return _made_once(_expert_shards(mesh))


def _expert_shards(mesh: ParallelMesh) -> list[tuple[int, ...]]:
    return [ranks[start :: mesh.ep] for ranks in mesh.groups("dp_shard") for start in range(mesh.ep)]


def expert_group(mesh: ParallelMesh) -> Group:
    """The ranks over which experts are spread: consecutive ones of ``dp_shard``. Collective as :func:`group`."""
    _prepare(mesh)
    return _made_once(_expert_owners(mesh))


def _expert_owners(mesh: ParallelMesh) -> list[tuple[int, ...]]:
    return [
        ranks[start : start + mesh.ep] for ranks in mesh.groups("dp_shard") for start in range(0, mesh.dp_shard, mesh.ep)
    ]


def whole_group(mesh: ParallelMesh) -> Group:
    """All ranks of the mesh."""
    return group(mesh, *AXES)


def _prepare(mesh: ParallelMesh) -> None:
    if _prepared.get(mesh) is collectives.world():
        return
    _prepared[mesh] = collectives.world()
    for axes in _IN_USE:
        _made_once(mesh.groups(*axes))
    for partition in (_expert_shards(mesh), _expert_owners(mesh)):
        _made_once(partition)


def _made_once(partition: list[tuple[int, ...]]) -> Group:
    key = tuple(partition)
    entry = _groups.get(key)
    if entry is None or entry[1] is not collectives.world():
        entry = _groups[key] = (collectives.make_group(partition), collectives.world())
    return entry[0]
