"""Rank programs: parameters of which several ranks hold a copy, completed by ``finish_gradients``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from harness import local_gradients, placed, plain, with_gradient, with_local_gradient
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import hyper_parallel
from hyper_parallel import clip_grad_norm_, finish_gradients, get_total_norm, grad_norm_report, mark_shared


class Collectives:
    """Counts the collectives between entry and exit."""

    def __enter__(self) -> Collectives:  # noqa: PYI034
        self.names: list[str] = []
        self.kept = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_single", "all_gather_object")}
        for name, function in self.kept.items():
            setattr(dist, name, self._counted(name, function))
        return self

    def _counted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            return function(*arguments, **options)

        return call

    def __exit__(self, *exception: object) -> None:
        for name, function in self.kept.items():
            setattr(dist, name, function)


def _error(function: Any, *arguments: Any, **options: Any) -> dict[str, str]:
    try:
        function(*arguments, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "none", "message": ""}


def tied_across_stages() -> dict[str, Any]:
    """Two stages of two replicas; the embedding (20, 0 | 0, 20) lies on both, each with a part of its gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    stage, dp = mesh["pp"].get_local_rank(), mesh["dp_shard"]
    parts = ([[20.0, 5.0], [0.0, 8.0]], [[0.0, -5.0], [0.0, 12.0]])
    embedding = with_gradient(parts[stage], dp, "S0")
    own = with_gradient([[3.0], [4.0]], dp, "S0")
    mark_shared(embedding, mesh["pp"])
    parameters = [embedding, own] if stage == 0 else [own, embedding]
    told: dict[str, Any] = {"before": _error(clip_grad_norm_, parameters, 1.0, mesh=mesh)}
    for turn in ("first", "again"):
        with Collectives() as collectives:
            finish_gradients(parameters, mesh)
        told[turn] = local_gradients([embedding])
        told[f"{turn}: collectives"] = collectives.names
    with Collectives() as collectives:
        report = grad_norm_report(parameters, math.inf, mesh=mesh)
    told["collectives"] = collectives.names
    told["norm"] = report.norm.item()
    told["gradients only"] = get_total_norm([p.grad for p in parameters], mesh=mesh).item()
    told["contributed"] = [part.contributed for part in report.parts]
    classes = grad_norm_report(parameters, mesh=mesh, per_class=True).classes
    told["classes"] = sorted((part.name, part.norm, part.elements, part.ranks) for part in classes)
    told["clipped twice"] = [clip_grad_norm_(parameters, bound, mesh=mesh).item() for bound in (1.0, 0.5, math.inf)]
    embedding.grad += embedding.grad  # a second backward
    told["accumulated"] = _error(clip_grad_norm_, parameters, 1.0, mesh=mesh)
    return told


def tensor_parallel_witness() -> dict[str, Any]:
    """pytorch#190626: one data-parallel rank, two tensor-parallel ones; compute in bfloat16, reduction in float32."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            ones = DTensor.from_local(torch.ones(4), mesh["tp"], placed("R"), run_check=False)
            self.weight = torch.nn.Parameter(ones)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
            return (weight * x).sum()

    policy = hyper_parallel.MixedPrecisionPolicy(compute_dtype="bfloat16", reduce_dtype="float32")
    model = hyper_parallel.fully_shard(Norm(), mesh=mesh["dp_shard"], mp_policy=policy)
    mark_shared(model.weight, mesh["tp"])
    witness = (1.0, 2.0**-10)[mesh["tp"].get_local_rank()]
    model(torch.full((4,), witness, dtype=torch.bfloat16)).backward()
    finish_gradients(model)
    return {
        "gradient": local_gradients([model.weight])[0],
        "placements": str(model.weight.grad.placements),
        "norm": clip_grad_norm_(model, math.inf).item(),
    }


def copies_without_gradient(missing: list[int], frozen: list[int]) -> dict[str, Any]:
    """One weight on all ranks, of which rank r has the part (r + 1, 0); some have none, some do not train it."""
    rank = dist.get_rank()
    weight = plain([rank + 1.0, 0.0])
    mark_shared(weight, dist.group.WORLD)
    if rank in missing:
        weight.grad = None
    weight.requires_grad_(rank not in frozen)
    finish_gradients([weight])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    norm = clip_grad_norm_([weight], math.inf, mesh=mesh).item()
    return {"gradient": None if weight.grad is None else weight.grad.tolist(), "norm": norm}


def main_grads() -> dict[str, Any]:
    """bfloat16 gradients beside a float32 or float64 ``main_grad`` that holds the part."""
    told = {}
    part = (1.0, 2.0**-10)[dist.get_rank()]
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        weight.grad = torch.full((1,), 7.0, dtype=torch.bfloat16)
        weight.main_grad = torch.full((1,), part * (1 + 2.0**-40), dtype=dtype)
        if dist.get_rank() == 1 and dtype == torch.float64:
            weight.grad = weight.main_grad = None  # gets one as wide as the other's
        mark_shared(weight, dist.group.WORLD)
        finish_gradients([weight])
        told[str(dtype)] = (str(weight.main_grad.dtype), weight.main_grad.item().hex())
        told[f"{dtype}: grad"] = None if weight.grad is None else weight.grad.item()
    return told


def on_two_axes() -> dict[str, Any]:
    """A weight that all four ranks hold, in parts 1, 2, 4 and 8, marked for one axis after the other; one shared along rows only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = dist.get_rank()
    both, row = plain([2.0**rank]), plain([10.0**rank])
    for axis in ("a", "b"):
        mark_shared(both, mesh[axis])
    mark_shared(row, mesh["b"])
    with Collectives() as first:
        finish_gradients([both, row])
    both.grad, row.grad = torch.tensor([1.0]), torch.tensor([1.0])
    with Collectives() as second:
        finish_gradients([both, row])
    return {"sums": [both.grad.item(), row.grad.item()], "first": first.names, "second": second.names}


def partial_gradients(norm_type: float) -> dict[str, Any]:
    """(3, 4) in two parts, beside 12 sharded: what the clip does to Partial gradients, and what finish_gradients makes of them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    part = ([1.0, 6.0], [2.0, -2.0])[dist.get_rank()]

    def parameters() -> list[torch.nn.Parameter]:
        found = [with_local_gradient(part, mesh, "P") for _ in range(3)]
        whole = [torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, placed("R"))) for _ in found]
        for parameter, gradient in zip(whole, found, strict=True):
            parameter.grad = gradient.grad
        return [*whole, with_gradient([0.0, 12.0], mesh, "S0")]

    listed = parameters()
    with Collectives() as clip:
        norm = clip_grad_norm_(listed, 1.0, norm_type).item()
    told = {"norm": norm, "clip": clip.names, "clipped": local_gradients(listed)}
    told["placements"] = [str(p.grad.placements) for p in listed]
    listed = parameters()
    finish_gradients(listed)
    with Collectives() as finish:
        finish_gradients(listed)
    told["finished"] = local_gradients(listed)
    told["finished placements"] = [str(p.grad.placements) for p in listed]
    told["finished norm"] = clip_grad_norm_(listed, math.inf, norm_type).item()
    told["again"] = finish.names
    return told


def partial_on_one_rank() -> dict[str, Any]:
    """Rank 1 has no gradient where rank 0 has a Partial one: neither waits for the other."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, placed("R")))
    if dist.get_rank() == 0:
        parameter.grad = with_local_gradient([3.0, 4.0], mesh, "P").grad
    told: dict[str, Any] = {"clip": _error(clip_grad_norm_, [parameter], 1.0)}
    finish_gradients([parameter])
    return told | {"finished": local_gradients([parameter]), "norm": clip_grad_norm_([parameter], 1.0).item()}


def errors() -> dict[str, Any]:
    """Mistakes of one rank or of all: every rank is told the same, and goes on."""
    rank, told = dist.get_rank(), {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    listed = [with_gradient([3.0, 4.0], mesh, "R"), plain([[1.0]])]
    if rank == 1:
        listed[1].grad = torch.sparse_coo_tensor([[0], [0]], [1.0], (1, 1))
    told["sparse"] = _error(clip_grad_norm_, listed, 1.0)
    told["untouched"] = local_gradients(listed[:1])[0]
    weights = [plain([1.0]), plain([1.0, 2.0])]
    for weight in weights if rank == 0 else weights[:1]:
        mark_shared(weight, dist.group.WORLD)
    told["marked differently"] = _error(finish_gradients, weights)
    changed = plain([1.0])
    mark_shared(changed, dist.group.WORLD)
    finish_gradients([changed])
    if rank == 1:
        changed.grad += 1.0
    told["changed on one"] = _error(clip_grad_norm_, [changed], 1.0, mesh=mesh)
    told["changed on one, again"] = _error(finish_gradients, [changed])
    if rank == 1:
        changed.grad = torch.tensor([1.0])
    told["complete on one"] = _error(finish_gradients, [changed])
    told["not a tensor"] = _error(clip_grad_norm_, [listed[0], None] if rank == 1 else listed[:1], 1.0)
    told["too small a mesh"] = _error(clip_grad_norm_, listed[:1], 1.0, mesh=DeviceMesh("cpu", [rank], _init_backend=False))
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([rank])).sum().backward()
    mark_shared(table.weight, dist.group.WORLD)
    told["sparse part"] = _error(finish_gradients, table)
    largest = with_gradient([3.0, 4.0], mesh, "R")
    if rank == 0:
        largest.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Partial("max")], run_check=False)
    told["largest part"] = _error(finish_gradients, [largest])
    named = torch.nn.Linear(1, 1, bias=False)
    mark_shared(named.weight, dist.group.WORLD)
    named.weight.grad = torch.ones(1, 1)
    told["named"] = _error(clip_grad_norm_, named, 1.0, mesh=mesh)
    told["two axes"] = _error(mark_shared, changed, init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b")))
    return told


def changed_in_place() -> dict[str, Any]:
    """A gradient with parts (1, 0) on each rank, completed, and then scaled, or accumulated into, in place; as .grad and main_grad."""
    told: dict[str, Any] = {}
    for what, change in (("scaled", lambda g: g.mul_(0.5)), ("accumulated", lambda g: g.add_(torch.tensor([1.0, 0.0])))):
        weight = plain([1.0, 0.0])
        mark_shared(weight, dist.group.WORLD)
        finish_gradients([weight])
        change(weight.grad)
        told[what] = _error(finish_gradients, [weight])
        told[f"{what}: gradient"] = weight.grad.tolist()
    weight = plain([0.0, 0.0])
    weight.main_grad = torch.tensor([1.0, 0.0])
    mark_shared(weight, dist.group.WORLD)
    for _ in range(2):  # a buffer, zeroed and filled again in each step
        weight.main_grad.zero_().add_(torch.tensor([1.0, 0.0]))
        finish_gradients([weight])
    told["main_grad"] = weight.main_grad.tolist()
    return told


def complex_parts() -> dict[str, Any]:
    """Parts (1 + 2i, 3i), in complex64 and complex128; rank 1 has none."""
    told = {}
    for dtype in (torch.complex64, torch.complex128):
        weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        if dist.get_rank() != 1:
            weight.grad = torch.tensor([1 + 2j, 3j], dtype=dtype)
        mark_shared(weight, dist.group.WORLD)
        finish_gradients([weight])
        told[str(dtype)] = [[value.real, value.imag] for value in weight.grad.tolist()]
    return told


def twins() -> dict[str, Any]:
    """Two models of the same shapes on two stages; only the second one's weights (gradients of threes and fours) are shared."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp_shard"))

    def model() -> Any:
        module = torch.nn.Module()
        module.a, module.b = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
        module.forward = lambda: (module.a * 3).sum() + (module.b * 4).sum()
        return hyper_parallel.fully_shard(module, mesh=mesh["dp_shard"])

    first, second = model(), model()
    for shared in (second.a, second.b):
        mark_shared(shared, mesh["pp"])
    told: dict[str, Any] = {}
    first().backward()
    told["first"] = [clip_grad_norm_(first, math.inf, mesh=mesh).item() for _ in range(2)]
    second().backward()
    told["parts"] = _error(clip_grad_norm_, second, math.inf, mesh=mesh)
    finish_gradients(second)
    told["second"] = clip_grad_norm_(second, math.inf, mesh=mesh).item()
    told["first again"] = clip_grad_norm_(first, math.inf, mesh=mesh).item()
    return told


def meshes(case: str) -> dict[str, Any]:
    """Parameters on several meshes at once; all gradients are ones."""
    ones = [[1.0] * 4] * 4
    told = {}
    if case == "one on each axis":  # pytorch#180346
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        parameters = [with_gradient(ones, mesh["a"], "S0"), with_gradient(ones, mesh["b"], "S0")]
    if case == "tensor parallel beside plain data parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parameters = [with_gradient(ones, mesh, "S0 S1"), with_gradient(ones, mesh["dp"], "S0"), with_gradient(ones, mesh, "S0 R")]
    if case == "experts beside dense":
        dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dpm", "ep"))
        parameters = [with_gradient(ones, dense, "S0"), with_gradient(ones, experts, "S1 S0"), with_gradient(ones, experts["ep"], "S0")]
    if case == "flattened":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("r", "s", "tp"))
        flat = mesh["r", "s"]._flatten("dp")
        parameters = [with_gradient(ones, flat, "S0"), with_gradient(ones, mesh["tp"], "S0")]
    if case == "of different ranks, cut from nothing":
        here = dist.get_rank() // 2 * 2
        parts = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        mine = parts[here // 2]
        whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        parameters = [with_gradient(ones, mine, "S0"), with_gradient(ones, whole, "S0")]
        told["error"] = _error(clip_grad_norm_, parameters, 1.0)
        return told
    report = grad_norm_report(parameters, math.inf, per_class=True, per_parameter=True)
    told["norm"] = report.norm.item()
    told["ranks"] = [part.rank for part in report.parts]
    told["classes"] = sorted((part.name, part.norm, part.elements) for part in report.classes)
    told["parameters"] = [(part.name, part.norm, part.elements) for part in report.parameters]
    return told


def hybrid_of_eight() -> dict[str, Any]:
    """The second part of the report of issue 64: the returned norm and the local ones, on two replicas of four shards."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
    weight = with_gradient([float(n) for n in range(1, 9)], mesh, "R S0")
    local = torch.linalg.vector_norm(weight.grad.to_local()).item()
    report = grad_norm_report([weight], 1.0)
    return {"norm": report.norm.item(), "local": local, "held": [part.held for part in report.parts]}
