"""Rank program: many layouts of gradients, each placed, finished and clipped as it says; what every rank then holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel import finish_gradients, grad_norm_report, mark_shared

_meshes: dict[Any, DeviceMesh] = {}


def clip_each(layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each layout: the norm and its dtype, and this rank's gradients after the clip; or the error."""
    _meshes.clear()
    return [_clip(layout) for layout in layouts]


def _clip(layout: dict[str, Any]) -> dict[str, Any]:
    meshes = [_mesh(tuple(sizes), tuple(names)) for sizes, names in layout["meshes"]]
    rank = dist.get_rank()
    listed = [_parameter(p, meshes, rank) for p in layout["parameters"] if p["local_shape"][rank] is not None]
    if any(p["shared"] for p in layout["parameters"]):
        finish_gradients(listed)
    parameters = [p for p in listed for _ in range(2 if p.twice else 1)]
    try:
        report = grad_norm_report(
            iter(parameters), layout["max_norm"], layout["norm_type"], mesh=meshes[0] if layout["pass_mesh"] else None
        )
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "norm": report.norm.item(),
        "dtype": str(report.norm.dtype),
        "differ": report.replicas_differ,
        "gradients": [_local_gradient(p) for p in listed],
    }


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    if (sizes, names) not in _meshes:
        _meshes[sizes, names] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _meshes[sizes, names]


def _parameter(told: dict[str, Any], meshes: list[DeviceMesh], rank: int) -> torch.nn.Parameter:
    dtype = getattr(torch, told["dtype"])
    gradient_dtype = getattr(torch, told["gradient_dtype"])
    values = told["local"][rank]
    zeros = torch.zeros(told["local_shape"][rank], dtype=dtype)
    gradient = None if values is None else torch.tensor(values, dtype=gradient_dtype).view(zeros.shape)
    root = meshes[told["root"]]
    if told["axes"] is None:
        parameter = torch.nn.Parameter(zeros)
    else:
        mesh = root if told["axes"] == list(root.mesh_dim_names) else root[tuple(told["axes"])]
        shape = torch.Size(told["shape"])
        whole = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        placements = [_placement(text) for text in told["placements"]]
        own = [Replicate() if p.is_partial() else p for p in placements]
        parameter = torch.nn.Parameter(DTensor.from_local(zeros, mesh, own, run_check=False, **whole))
        if gradient is not None:
            gradient = DTensor.from_local(gradient, mesh, placements, run_check=False, **whole)
    if told["main_grad"]:
        parameter.main_grad = gradient
        parameter.grad = None if gradient is None else torch.full_like(parameter, 1e4)  # not to be looked at
    else:
        parameter.grad = gradient
    for axis in told["shared"]:
        mark_shared(parameter, root.get_group(axis))
    parameter.requires_grad_(not told["frozen"])
    parameter.twice = told["twice"]
    return parameter


def _placement(text: str) -> Placement:
    """R, P (a sum), A (an average), S<dim>, or S<dim>/<pieces> for a shard of each of that many pieces."""
    if text == "R":
        return Replicate()
    if text in "PA":
        return Partial("sum" if text == "P" else "avg")
    dim, _, pieces = text[1:].partition("/")
    return _StridedShard(int(dim), split_factor=int(pieces)) if pieces else Shard(int(dim))


def _local_gradient(parameter: Any) -> list[float] | None:
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    if gradient is None:
        return None
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.double().flatten().tolist()
