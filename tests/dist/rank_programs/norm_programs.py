"""Rank programs: gradients placed by hand, and the norm that every rank is told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Weights, local_gradients, placed, plain, with_gradient, with_local_gradient
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hyper_parallel
from hyper_parallel import ParallelMesh, clip_grad_norm_, get_total_norm, grad_norm_report


def _mesh(*sizes: int) -> DeviceMesh:
    names = ("dp_replicate", "dp_shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _told(report: Any) -> dict[str, Any]:
    return {
        "norm": report.norm.item(),
        "dtype": str(report.norm.dtype),
        "held": [part.held for part in report.parts],
        "contributed": [part.contributed for part in report.parts],
        "with_gradient": [part.with_gradient for part in report.parts],
        "ranks": [part.rank for part in report.parts],
        "replicas_differ": report.replicas_differ,
    }


def placed_by_hand(sizes: list[int], gradients: list[tuple[Any, str]], norm_type: float = 2.0) -> dict[str, Any]:
    """``gradients``: (whole gradient, placements); "plain" is no DTensor."""
    mesh = _mesh(*sizes)
    parameters = [plain(g) if how == "plain" else with_gradient(g, mesh, how) for g, how in gradients]
    told = _told(grad_norm_report(parameters, 1.0, norm_type))
    return told | {"clipped": local_gradients(parameters)}


def replicated_beside_local(replicated: list[float], local: list[list[float]]) -> dict[str, Any]:
    """A dense parameter that all hold, and one of which each rank holds another part."""
    mesh = _mesh(dist.get_world_size())
    parameters = [with_gradient(replicated, mesh, "R"), with_local_gradient(local[dist.get_rank()], mesh, "S0")]
    return _told(grad_norm_report(parameters, 1.0)) | {"clipped": local_gradients(parameters)}


def uneven_and_empty_shards(norm_types: list[Any]) -> dict[str, Any]:
    """FSDP2's own gradients 1 ... 11 of shapes (3, 2) and (5,): some ranks hold less, some nothing."""
    model = hyper_parallel.fully_shard(Weights([(3, 2), (5,)]), mesh=_mesh(dist.get_world_size()))
    model().backward()
    norms = [clip_grad_norm_(model, math.inf, norm_type).item() for norm_type in norm_types]
    return {"norms": norms, "clipped": [clip_grad_norm_(model, 1.0).item(), clip_grad_norm_(model, math.inf).item()]}


def ways_to_hold_a_gradient() -> dict[str, Any]:
    """The same norm whether gradients are FSDP2's views of one buffer, copies, or of a second step."""
    model = hyper_parallel.fully_shard(Weights([(3, 2), (5,)]), mesh=_mesh(dist.get_world_size()))
    parameters = list(model.parameters())
    model().backward()
    told = {"one buffer": clip_grad_norm_(model, math.inf).item()}
    told["generator"] = clip_grad_norm_((p for p in parameters), math.inf).item()
    told["get_total_norm"] = get_total_norm(p.grad for p in parameters).item()
    for parameter in parameters:
        parameter.grad = parameter.grad.clone()
    told["clones"] = clip_grad_norm_(model, math.inf).item()
    model.zero_grad()
    told["none"] = clip_grad_norm_(model, math.inf).item()
    model(2.0).backward()
    told["second step, twice as large"] = clip_grad_norm_(model, math.inf).item()
    model(1.0).backward()
    told["accumulated"] = clip_grad_norm_(model, math.inf).item()
    for parameter in parameters:
        parameter.main_grad = parameter.grad / 3
    told["main_grad"] = clip_grad_norm_(model, math.inf).item()
    return told


def spoiled_padding(where: str) -> dict[str, Any]:
    """FSDP2's buffer of shapes (5,) and (3,) on 2 ranks: rank 1 holds 2 and 1 elements, and one of padding after each."""
    model = hyper_parallel.fully_shard(Weights([(5,), (3,)]), mesh=_mesh(2))
    parameters = list(model.parameters())
    told: dict[str, Any] = {}
    for step in (1, 2):
        model.zero_grad()
        model().backward()
        grads = [p.grad._local_tensor for p in parameters]
        storage = grads[0].untyped_storage()
        told["one storage"] = storage.data_ptr() == grads[1].untyped_storage().data_ptr()
        flat = torch.empty(0).set_(storage)
        told["size"] = len(flat)
        if dist.get_rank() == 1 and (where == "from the start" or step == 2):
            flat[2] = 1000.0  # padding of the first
        told[f"step {step}"] = clip_grad_norm_(parameters, math.inf).item()
        told[f"minimum {step}"] = clip_grad_norm_(parameters, math.inf, -math.inf).item()
    told["part of the list"] = clip_grad_norm_(parameters[:1], 1.0).item()  # the other lies in the same buffer
    told["left alone"] = local_gradients(parameters[1:])
    return told


def gradients_missing(case: str, norm_type: float = 2.0) -> dict[str, Any]:
    """W of four ones sharded over 2 ranks twice, V (3) replicated; some ranks lack some of them."""
    rank = dist.get_rank()
    mesh = _mesh(2, 2)
    w = with_gradient([1.0, 1.0, 1.0, 1.0], mesh, "R S0")
    u = with_gradient([2.0, 2.0], mesh, "R S0")
    v = with_gradient([3.0], mesh, "R R")
    if case == "one rank of a sharded parameter" and rank in (1, 3):
        u.grad = None
    if case == "the replica that would count" and rank in (0, 1):
        u.grad = v.grad = None
    if case == "one rank without any" and rank == 3:
        u.grad = v.grad = w.grad = None
    if case == "everywhere but on rank 2" and rank != 2:
        u.grad = v.grad = w.grad = None
    if case == "everywhere":
        u.grad = v.grad = w.grad = None
    if case == "all frozen on rank 1" and rank == 1:
        for parameter in (u, v, w):
            parameter.requires_grad_(False)
    told = _told(grad_norm_report([w, u, v], 1.0, norm_type))
    return told | {"clipped": local_gradients([w, u, v])}


def error_of(case: str) -> dict[str, Any]:
    """What each rank is told when the ranks hold different lists or something that is not finite."""
    rank = dist.get_rank()
    mesh = _mesh(dist.get_world_size())
    model = torch.nn.Module()
    model.first = with_gradient([1.0, 2.0, 3.0, 4.0], mesh, "S0")
    model.second = with_gradient([5.0, 6.0], mesh, "R")
    parameters: Any = model
    if case == "a shape differs":
        parameters = [model.first, with_local_gradient([5.0, 6.0, 7.0], mesh, "R") if rank == 2 else model.second]
    if case == "one is left out":
        parameters = [model.first] if rank == 0 else [model.first, model.second]
    if case == "another order":
        parameters = [model.second, model.first] if rank == 1 else [model.first, model.second]
    if case == "only those with gradients":
        model.second.requires_grad_(rank != 1)
    if case == "nan in a shard" and rank == 2:
        model.first.grad._local_tensor[0] = math.nan
    if case == "inf on a replica that does not count" and rank == 3:
        model.second.grad._local_tensor[1] = math.inf
    if case == "beyond float32":
        model.first.grad._local_tensor.fill_(3e38)
    before = local_gradients([model.first, model.second])
    told: dict[str, Any] = {}
    if "differ" not in case and case not in ("one is left out", "another order", "only those with gradients"):
        told["norm"] = repr(clip_grad_norm_(parameters, 1.0).item())
        told["untouched"] = repr(local_gradients([model.first, model.second])) == repr(before)
    try:
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        told |= {"kind": type(error).__name__, "message": str(error)}
    return told


def float64_on_one_rank() -> dict[str, Any]:
    """A main_grad that only rank 1 keeps in float64."""
    mesh = _mesh(2)
    parameter = with_gradient([3.0, 4.0], mesh, "S0")
    if dist.get_rank() == 1:
        parameter.main_grad = DTensor.from_local(torch.tensor([4.0], dtype=torch.float64), mesh, parameter.placements)
    return _told(grad_norm_report([parameter]))


def replicas_that_differ() -> dict[str, Any]:
    mesh = _mesh(2, 2)
    value = 2.0 if dist.get_rank() == 3 else 1.0
    return _told(grad_norm_report([with_local_gradient([value, value], mesh, "R S0")]))


def scopes(whole: list[int]) -> dict[str, Any]:
    """The norm over meshes of part of the ranks, of all in another order, and as a ParallelMesh."""
    rank, world = dist.get_rank(), dist.get_world_size()
    told: dict[str, Any] = {}
    rows = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp_shard"))
    part = with_local_gradient([float(rank + 1)], rows["dp_shard"], "S0")
    told["sub-mesh"] = _told(grad_norm_report([part]))
    cube = init_device_mesh("cpu", (2, 2, world // 4), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    half = with_local_gradient([1.0], cube["dp_replicate", "dp_shard"], "R S0")
    told["two axes of three"] = _told(grad_norm_report([half]))
    turned = DeviceMesh("cpu", list(reversed(range(world))))
    told["reversed"] = _told(grad_norm_report([with_local_gradient([float(rank)], turned, "S0")]))
    mesh = ParallelMesh(**dict(zip(("dp_replicate", "dp_shard"), whole, strict=True)))
    device_mesh = _mesh(*whole)
    sharded = with_gradient([1.0, 2.0, 3.0, 4.0], device_mesh, "R S0")
    told["DeviceMesh"] = _told(grad_norm_report([sharded], mesh=device_mesh))
    told["ParallelMesh"] = _told(grad_norm_report([sharded], mesh=mesh))
    for empty_on in (0, 1):
        listed = [] if rank == empty_on else [plain([3.0, 4.0])]
        told[f"empty on {empty_on}"] = _told(grad_norm_report(listed, mesh=mesh))
    told["nothing anywhere"] = _told(grad_norm_report([], mesh=mesh))
    try:
        grad_norm_report([sharded], mesh=device_mesh["dp_shard"])
    except ValueError as error:
        told["too small"] = str(error)
    return told


def hundred_million(elements: int) -> dict[str, Any]:
    """A sharded gradient; the float64 norm of each shard is taken here, by NumPy."""
    local = torch.empty(elements // dist.get_world_size())
    generator = torch.Generator().manual_seed(dist.get_rank())
    local.uniform_(generator=generator) if dist.get_rank() % 2 else local.normal_(generator=generator)
    squares = math.fsum(float(np.square(part, dtype=np.float64).sum()) for part in np.array_split(local.numpy(), 100))
    mesh = _mesh(dist.get_world_size())
    norm = get_total_norm([DTensor.from_local(local, mesh, placed("S0"), run_check=False)])
    return {"norm": norm.item(), "squares": squares}


def scalars() -> dict[str, Any]:
    """A 0-dim parameter, shared by two modules, through ``hyper_parallel.fully_shard``."""

    class Scaled(torch.nn.Module):
        def __init__(self, scale: torch.nn.Parameter) -> None:
            super().__init__()
            self.scale = scale
            self.weight = torch.nn.Parameter(torch.tensor([3.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(self.scale.shape))
            return self.scale * x + self.weight.sum()

    seen: list[tuple[int, ...]] = []
    scale = torch.nn.Parameter(torch.tensor(2.0))
    model = torch.nn.Sequential(Scaled(scale), Scaled(scale))
    hyper_parallel.fully_shard(model, mesh=_mesh(dist.get_world_size()))
    parameters = dict(model.named_parameters())
    # y = s (s x + 3) + 3: dy/ds = 2 s x + 3, dy/dw0 = s, dy/dw1 = 1
    x = float(dist.get_rank() + 1)
    y = model(torch.tensor(x))
    y.backward()
    return {
        "seen": seen,
        "names": list(parameters),
        "y": y.item(),
        "gradients": {name: p.grad.full_tensor().tolist() for name, p in parameters.items()},
        "norm": clip_grad_norm_(model, math.inf).item(),
        "again": model(torch.tensor(x)).item(),
    }


def tied() -> dict[str, Any]:
    """One weight in two modules of an FSDP model, and the list that names it twice."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    hyper_parallel.fully_shard(model, mesh=_mesh(2))
    weight = model[0].weight
    assert model[1].weight is weight
    weight.grad = with_gradient([[20.0, 0.0], [0.0, 20.0]], weight.device_mesh, "S0").grad
    norm = clip_grad_norm_([model[0].weight, model[1].weight], 1.0).item()
    return {"norm": norm, "clipped": clip_grad_norm_(model, math.inf).item()}


def converted_in_place() -> dict[str, Any]:
    """``Module.cpu`` swaps DTensors in place, which torch refuses for a tensor that has a weak reference."""
    model = hyper_parallel.fully_shard(Weights([(4,)]), mesh=_mesh(2))
    model().backward()
    first = clip_grad_norm_(model, math.inf)
    model.cpu()
    model().backward()
    return {"norms": [first.item(), clip_grad_norm_(model, math.inf).item()]}


def local_shapes(shapes: list[list[int]]) -> list[list[int]]:
    """What FSDP2 really leaves of each parameter on this rank."""
    model = hyper_parallel.fully_shard(Weights(shapes), mesh=_mesh(dist.get_world_size()))
    return [list(parameter.to_local().shape) for parameter in model.parameters()]


def equal_meshes_of_two_roots() -> dict[str, Any]:
    """Half of the ranks used an equal mesh of another root before, and torch's cache of layouts may hand that out here."""
    before = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "x", "b"))
    if dist.get_rank() >= 2:
        with_local_gradient([0.0], before["a"], "S0")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    row, column = mesh.get_coordinate() or (0, 0)
    return _told(
        grad_norm_report(
            [with_local_gradient([1.0 + row], mesh["a"], "S0"), with_local_gradient([2.0 + 2 * column], mesh["b"], "S0")]
        )
    )
