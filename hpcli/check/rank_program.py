"""Each rank's part of checking one layout: run it, and tell what there is to see. It judges nothing."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import hyper_parallel
from hpcli.check.batch import check_batches
from hpcli.check.counting import CollectiveCounter
from hpcli.check.powers import power_norm
from hpcli.check.reference import VARIANTS, read_reference
from hpcli.check.witness import witness
from hpcli.config.schema import Config
from hpcli.data.batches import Batches
from hpcli.launch.context import RankContext
from hpcli.models.parallel import parallel_plan
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.sharding import local_pieces, parameter_cuts

OFFLOAD_STEPS = 3


def run(context: RankContext, payload: dict[str, Any]) -> None:
    """Check ``payload["config"]`` on ``payload["mesh"]`` against ``payload["reference"]``, with ``payload["fault"]`` planted."""
    config, mesh, device = Config.model_validate(payload["config"]), ParallelMesh(**payload["mesh"]), payload["device"]
    if payload["fault"]:
        from hpcli.faults.registry import plant

        plant(payload["fault"])
    context.progress(0, "build")
    hyper_parallel.init(
        "torch",
        device,
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout_seconds=context.timeout_seconds,
        strict_dtypes=config.device_options.strict_dtypes,
    )
    context.emit(_look(context, config, mesh, device, Path(payload["reference"])))
    dist.barrier()
    dist.destroy_process_group()


def _look(
    context: RankContext, config: Config, mesh: ParallelMesh, device: str, reference: Path
) -> dict[str, Any]:
    told: dict[str, Any] = {"rank": context.rank, "coordinates": mesh.coordinates(context.rank)}
    norm_type = config.training.norm_type
    # What is proved of the gradients is proved by their 2-norm; the norm that was asked for follows from the same gradients.
    config = config.model_copy(update={"training": config.training.model_copy(update={"norm_type": 2.0})})
    engine = TorchEngine(config, mesh, device)
    told["collectives_add_up"] = _self_test(engine.device)
    batches = check_batches(config)
    told["loss"] = float(_accumulate(context, engine, config, mesh, batches, 1, told))
    told["reshards"] = any(
        group.post_forward_mesh_info is not None
        for part in engine.parts
        for name, module in part.named_modules()
        if name and isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    )
    told["parameters"] = _compared(engine, config, mesh, reference, context.rank, norm_type)
    if norm_type != 2:
        every = list(engine.parameters.values())
        other = hyper_parallel.grad_norm_report(every, math.inf, norm_type, mesh=engine.norm_mesh)
        told["norm_of_type"] = float(other.norm) / (engine.loss_scale if norm_type else 1.0)
    told["classes"] = _class_norms(engine, {entry["name"]: entry["class"] for entry in told["parameters"]})
    context.progress(1, "gradient norm")
    with CollectiveCounter() as counter:
        report = engine.clip()
    told["collectives"] = counter.total
    part = next(part for part in report.parts if part.rank == context.rank)
    told |= {"norm": struct.pack("<d", float(report.norm)).hex(), "held": part.held, "contributed": part.contributed}
    told["clipped"] = {name: _square_sum(parameter.grad) for name, parameter in engine.parameters.items()}
    if config.training.compute_dtype != "float32" or mesh.tp > 1:
        told["witness"] = witness(config, mesh, engine.device.type)
    if config.fsdp_config.enable_offload:
        told["offload"] = _offload_changes(context, config, mesh, device)
        told["offload_binds"] = device in ("cpu", "sim-npu")  # elsewhere the host's arithmetic is not the device's
    return told


def _accumulate(
    context: RankContext,
    engine: TorchEngine,
    config: Config,
    mesh: ParallelMesh,
    batches: Batches,
    step: int,
    told: dict[str, Any] | None = None,
) -> torch.Tensor:
    share = batches.share(step, mesh.data_parallel_rank(context.rank), mesh.data_parallel_size)
    if told is not None:
        told["data"] = hashlib.blake2b(share.inputs.tobytes(), digest_size=8).hexdigest()
    micro_batches = share.split(config.training.micro_batch_size or len(share.inputs))
    return engine.accumulate(micro_batches, batches.valid_tokens(step), lambda phase: context.progress(step, phase))


def _self_test(device: torch.device) -> bool:
    """Whether collectives on ``device`` add up and gather what they should, on numbers that are exact."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([2.0**rank], device=device)
    dist.all_reduce(total)
    gathered = torch.zeros(ranks, device=device)
    dist.all_gather_single(gathered, torch.tensor([float(rank)], device=device))
    return float(total.cpu()) == 2.0**ranks - 1 and gathered.cpu().tolist() == list(range(ranks))


def _compared(
    engine: TorchEngine, config: Config, mesh: ParallelMesh, path: Path, rank: int, norm_type: float
) -> list[dict[str, Any]]:
    """This rank's shard of every gradient beside the reference's slice: the sums that every judgement follows from."""
    reference, plan = read_reference(path), parallel_plan(config)
    tied = {"head.weight": "embedding.weight"} if config.model.tie_embeddings else {}
    entries = []
    for name, parameter in engine.parameters.items():
        known = tied.get(name, name)
        pieces = local_pieces(tuple(parameter.shape), parameter_cuts(plan, mesh, name, rank))
        where = tuple(slice(start, start + length) for start, length in pieces)
        slices = {variant: reference[variant][known][where] for variant in VARIANTS}
        gradient = parameter.grad
        entry: dict[str, Any] = {"name": name, "missing": gradient is None, "class": _class(name, tied, config, mesh)}
        entry["device"] = str(parameter.device.type)
        if gradient is not None:
            held = gradient.to_local().detach().cpu().double().numpy() / engine.loss_scale
            entry |= {"shape": list(held.shape), "expected_shape": list(slices["right"].shape)}
            if held.shape == slices["right"].shape:
                entry |= _sums(held, slices)
            if norm_type != 2:
                entry |= {"piece": [known, *map(str, pieces)], "power_norm": power_norm(held, norm_type)}
        entries.append(entry)
    return entries


def _sums(held: Any, slices: Mapping[str, Any]) -> dict[str, float]:
    right = slices["right"]
    distances = {variant: float(np.square(held - values).sum()) for variant, values in slices.items()}
    return {
        "gg": float(np.square(held).sum()),
        "gr": float((held * right).sum()),
        "rr": float(np.square(right).sum()),
        **{f"to_{variant}": distance for variant, distance in distances.items()},
    }


def _class(name: str, tied: Mapping[str, str], config: Config, mesh: ParallelMesh) -> str:
    plan = parallel_plan(config)
    if plan.is_expert(name):
        return "expert"
    if name in tied or name in tied.values():
        return "tied"
    return "replicated" if mesh.tp > 1 and plan.tensor_dim(name) is None else "sharded"


def _class_norms(engine: TorchEngine, classes: Mapping[str, str]) -> dict[str, float]:
    """The norm of each class by itself, by the function that is checked."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sorted(set(classes.values())))
    norms = {}
    for kind in sorted({kind for kinds in every for kind in kinds}):
        members = [parameter for name, parameter in engine.parameters.items() if classes[name] == kind]
        norms[kind] = float(hyper_parallel.grad_norm_report(members, mesh=engine.norm_mesh).norm) / engine.loss_scale
    return norms


def _square_sum(gradient: Any) -> float:
    return 0.0 if gradient is None else float(gradient.to_local().detach().cpu().double().square().sum())


def _offload_changes(context: RankContext, config: Config, mesh: ParallelMesh, device: str) -> list[str]:
    """What differs in any bit between some steps with offload and without."""
    runs = []
    for offload in (True, False):
        fsdp = config.fsdp_config.model_copy(update={"enable_offload": offload})
        engine = TorchEngine(config.model_copy(update={"fsdp_config": fsdp}), mesh, device)
        batches, seen = check_batches(config), []
        for step in range(1, OFFLOAD_STEPS + 1):
            loss = float(_accumulate(context, engine, config, mesh, batches, step))
            norm = float(engine.clip().norm)
            engine.update(1e-3)
            engine.zero_grad()
            seen.append((loss, norm))
        runs.append((seen, [p.to_local().detach().cpu().clone() for p in engine.parameters.values()]))
    (with_seen, with_weights), (without_seen, without_weights) = runs
    changes = [
        f"{what} of step {step}"
        for step, (a, b) in enumerate(zip(with_seen, without_seen, strict=True), 1)
        for what, x, y in (("loss", a[0], b[0]), ("norm", a[1], b[1]))
        if x != y
    ]
    if not all(torch.equal(a, b) for a, b in zip(with_weights, without_weights, strict=True)):
        changes.append(f"weights after {OFFLOAD_STEPS} steps")
    return changes
