"""Rank programs on the simulated NPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hyper_parallel
from hpcli.config.load import LoadedConfig
from hpcli.config.schema import Config
from hpcli.config.validate import resolve_config
from hpcli.data.documents import load_documents
from hpcli.data.text import TextBatches
from hpcli.launch.context import RankContext
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import ParallelMesh
from hyper_parallel.core.mesh import CONFIG_KEYS
from hyper_parallel.platform.npu_sim import copies


def call(context: RankContext, payload: dict[str, Any]) -> None:
    """As ``harness:call``, in a process group of the simulated NPU."""
    arguments = payload["arguments"]
    hyper_parallel.init(
        "torch",
        "sim-npu",
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout_seconds=context.timeout_seconds,
        strict_dtypes=arguments.pop("strict_dtypes", False),
    )
    module, _, function = payload["program"].partition(":")
    result = getattr(import_module(module), function)(**arguments)
    context.emit({"rank": context.rank, "result": result})
    dist.barrier()
    dist.destroy_process_group()


# -- training ---------------------------------------------------------------------------------------------------------


def train(config: dict[str, Any], mesh: dict[str, int], steps: int = 2) -> dict[str, Any]:
    """Losses and norms of ``steps`` steps in hexadecimal, where everything lived, and the copies of each step."""
    layout = ParallelMesh(**mesh)
    degrees = {CONFIG_KEYS[axis]: size for axis, size in mesh.items()}
    given = Config.model_validate({**config, "parallelism": degrees, "device": "sim-npu"})
    settings = resolve_config(LoadedConfig(given, "test", {}), ranks=layout.world_size).config
    engine = TorchEngine(settings, layout, "sim-npu")
    told: dict[str, Any] = {"losses": [], "norms": [], "copies": [], "computed on": set(), "pinned": set()}
    list(engine.parts[0].layers.values())[-1].ffn_norm.register_forward_hook(  # type: ignore[operator]
        lambda module, inputs, output: told["computed on"].update((str(module.weight.device), str(output.device)))
    )
    training = settings.training
    batches = TextBatches(
        load_documents(None),
        seq_length=training.seq_length,
        batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=True,
    )
    for step in range(1, steps + 1):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        micro_batches = share.split(training.micro_batch_size or len(share.inputs))
        before = copies()
        loss = engine.accumulate(micro_batches, batches.valid_tokens(step), lambda phase: None)
        told["copies"].append(copies().since(before)._asdict())
        report = engine.clip()
        gradients = [parameter.grad for parameter in engine.parameters.values()]
        told["gradients on"] = _devices(gradients)
        engine.update(1e-3)
        engine.zero_grad()
        told["losses"].append(_total(loss))
        told["norms"].append(float(report.norm).hex())
    parameters = list(engine.parameters.values())
    states = [value for state in engine.optimizer.inner.state.values() for value in state.values()]
    told["parameters on"] = _devices(parameters)
    told["optimizer state on"] = _devices([state for state in states if isinstance(state, torch.Tensor) and state.ndim])
    told["parameters"] = len(parameters)
    told["shard bytes"] = 4 * sum(_local(p).numel() for p in parameters)
    told["pinned"] = sorted({_local(p).is_pinned() for p in parameters if _local(p).numel()})
    told["computed on"] = sorted(told["computed on"])
    told["weights"] = [float(_local(p).double().sum().cpu()).hex() for p in parameters]
    return told


def _total(loss: torch.Tensor) -> str:
    everyone = torch.empty(dist.get_world_size(), dtype=loss.dtype, device=loss.device)
    dist.all_gather_single(everyone, loss.view(1))
    return float(everyone.cpu().sum()).hex()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _devices(tensors: list[Any]) -> list[str]:
    return sorted({str(_local(tensor).device) for tensor in tensors if tensor is not None})


# -- the clip ---------------------------------------------------------------------------------------------------------


def clip_with_torch_and_ours(offload: bool) -> dict[str, Any]:
    """One weight of 3s and 4s sharded over all ranks, as gradient too: what each clip returns or raises."""
    told: dict[str, Any] = {}
    for name, clip in (("torch", nn.utils.clip_grad_norm_), ("ours", hyper_parallel.clip_grad_norm_)):
        model = _sharded_linear(offload)
        (model(torch.ones(1, 2, device="npu")) * 0).sum().backward()
        weight = model.weight
        weight.grad._local_tensor.copy_(torch.tensor([[3.0, 4.0]]).expand_as(_local(weight)))
        try:
            norm = clip(model.parameters(), 1.0)
            told[name] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            told[f"{name}: gradient"] = _local(weight.grad).cpu().tolist()
            told[f"{name}: gradient on"] = str(_local(weight.grad).device)
        except RuntimeError as error:
            told[name] = str(error)
    return told


def _sharded_linear(offload: bool, reshard: bool = True) -> Any:
    """One row per rank."""
    world = dist.get_world_size()
    model = nn.Linear(2, world, bias=False)
    mesh = init_device_mesh("npu", (world,))
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    return fully_shard(model, mesh=mesh, offload_policy=policy, reshard_after_forward=reshard)


def clip_mixed_dtypes(clip: str) -> dict[str, Any]:
    """A float32 gradient (3, 0) and a float16 gradient (0, 4) on the device, clipped to a norm of 1."""
    wide, half = (nn.Parameter(torch.zeros(2, dtype=dtype, device="npu")) for dtype in (torch.float32, torch.float16))
    wide.grad = torch.tensor([3.0, 0.0], device="npu")
    half.grad = torch.tensor([0.0, 4.0], dtype=torch.float16, device="npu")
    function = nn.utils.clip_grad_norm_ if clip == "torch" else hyper_parallel.clip_grad_norm_
    try:
        norm = float(function([wide, half], 1.0))
    except RuntimeError as error:
        return {"error": str(error)}
    return {"norm": norm, "wide": wide.grad.tolist(), "half": half.grad.tolist()}


# -- the device -------------------------------------------------------------------------------------------------------


def refusals_of_host_tensors() -> dict[str, str]:
    """What each collective says to a CPU tensor."""
    world = dist.get_world_size()
    one, all_of_them = torch.ones(1), torch.ones(world)
    calls = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather": lambda: dist.all_gather([torch.ones(1) for _ in range(world)], one),
        "all_gather_single": lambda: dist.all_gather_single(all_of_them, one),
        "reduce_scatter": lambda: dist.reduce_scatter_single(one, all_of_them),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(world), all_of_them),
    }
    told = {}
    for name, collective in calls.items():
        try:
            collective()
            told[name] = "accepted"
        except RuntimeError as error:
            told[name] = str(error)
    return told


def collectives() -> dict[str, Any]:
    """Each collective on the device, on rank r with the number r + 1."""
    rank, world = dist.get_rank(), dist.get_world_size()
    told: dict[str, Any] = {}

    def mine(*values: float) -> torch.Tensor:
        return torch.tensor(values or (rank + 1,), dtype=torch.float32, device="npu")

    for name, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("avg", dist.ReduceOp.AVG)):
        value = mine()
        dist.all_reduce(value, operation)
        told[name] = value.tolist()
    value = mine()
    dist.broadcast(value, 1)
    told["broadcast"] = value.tolist()
    value = mine()
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    told["async"] = value.tolist()
    parts = [torch.zeros(1, device="npu") for _ in range(world)]
    dist.all_gather(parts, mine())
    told["all_gather"] = torch.cat(parts).tolist()
    whole = torch.zeros(world, device="npu")
    dist.all_gather_single(whole, mine())
    told["all_gather_single"] = whole.tolist()
    piece = torch.zeros(1, device="npu")
    dist.reduce_scatter_single(piece, mine(*range(world)))
    told["reduce_scatter"] = piece.tolist()
    swapped = torch.zeros(world, device="npu")
    dist.all_to_all_single(swapped, mine(*(10 * rank + other for other in range(world))))
    told["all_to_all"] = swapped.tolist()
    if rank == 0:
        dist.send(mine(7.0), 1)
    elif rank == 1:
        value = torch.zeros(1, device="npu")
        dist.recv(value, 0)
        told["recv"] = value.tolist()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    told["objects"] = objects
    pair = dist.new_group([0, 1])
    if rank < 2:
        value = mine()
        dist.all_reduce(value, group=pair)
        told["pair"] = value.tolist()
    told["device"] = str(value.device)
    return told


def freed_parameter() -> dict[str, Any]:
    """An unsharded parameter, looked at while its module runs and after FSDP2 has freed it."""
    model = _sharded_linear(offload=False)
    inner = nn.Sequential(model, nn.Linear(dist.get_world_size(), 1, bias=False))
    fully_shard(inner, mesh=init_device_mesh("npu", (dist.get_world_size(),)))
    seen: list[torch.Tensor] = []
    finite: list[bool] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(module.weight.detach())  # type: ignore[union-attr, operator]
        finite.append(bool(seen[-1].isfinite().all()))

    model.register_forward_pre_hook(look)
    inner(torch.ones(1, 2, device="npu"))
    return {"while it runs": finite, "after": [bool(value.isnan().all()) for value in seen]}


def reduce_float64() -> dict[str, Any]:
    """Gather, then sum, a float64 number on the device."""
    mine = torch.tensor([dist.get_rank() + 1.0], dtype=torch.float64, device="npu")
    everyone = torch.zeros(dist.get_world_size(), dtype=torch.float64, device="npu")
    dist.all_gather_single(everyone, mine)
    try:
        dist.all_reduce(mine)
    except RuntimeError as error:
        return {"gathered": everyone.tolist(), "reduced": str(error)}
    return {"gathered": everyone.tolist(), "reduced": mine.tolist()}
