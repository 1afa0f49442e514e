"""Gradients that are sums over ranks not yet made (DTensor's Partial), measured without being changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial

from hyper_parallel.platform.torch.mesh import communication_device

_SUMS = ("sum", "avg")


def is_partial(gradient: Any) -> bool:
    """Whether some axis of a gradient's mesh is still to be summed over."""
    return any(placement.is_partial() for placement in getattr(gradient, "placements", ()))


def unmeasurable(gradient: Any) -> str | None:
    """The reduction of a Partial placement that no scaling of the parts survives; None where there is none."""
    operations = [p.reduce_op for p in getattr(gradient, "placements", ()) if isinstance(p, Partial)]
    return next((operation for operation in operations if operation not in _SUMS), None)


def added_up(gradients: Sequence[Any]) -> list[torch.Tensor]:
    """This rank's piece of each Partial gradient after its reduction, in float32 (float64 stays); the gradients are untouched.

    One all-reduce for each group of ranks, the same bits on all of them. Every rank of the gradients' meshes must call it
    with the same list.
    """
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    values = [gradient._local_tensor.to(wide, copy=True) for gradient in gradients]
    axes = [[axis for axis, p in enumerate(g.placements) if p.is_partial()] for g in gradients]
    for turn in range(max(map(len, axes))):
        by_group: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[int]]] = {}
        for index, (gradient, partial) in enumerate(zip(gradients, axes, strict=True)):
            if turn < len(partial):
                group = gradient.device_mesh.get_group(partial[turn])
                by_group.setdefault(tuple(dist.get_process_group_ranks(group)), (group, []))[1].append(index)
        for ranks in sorted(by_group):  # one order on all ranks: groups may overlap
            group, members = by_group[ranks]
            _reduce([values[index] for index in members], group)
            for index in members:
                placement = gradients[index].placements[axes[index][turn]]
                if placement.reduce_op == "avg":
                    values[index] /= len(ranks)
    return values


def whole_everywhere(gradients: Sequence[Any], ranks: tuple[int, ...]) -> bool:
    """Whether, after their reduction, each of ``ranks`` holds every element of the gradients."""
    return all(
        not any(placement.is_shard() for placement in gradient.placements)
        and set(gradient.device_mesh.mesh.flatten().tolist()) >= set(ranks)
        for gradient in gradients
    )


def _reduce(values: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([value.reshape(-1) for value in values]).to(communication_device(group))
    dist.all_reduce(flat, group=group)
    for value, part in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(part.view(value.shape))
