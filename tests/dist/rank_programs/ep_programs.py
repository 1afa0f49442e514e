"""Rank programs: rows that travel to experts and back, what each rank has of the experts, and their gradients."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from layout_programs import _single_process
from tp_programs import Collectives

import hyper_parallel
from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.models.parallel import parallel_plan
from hpcli.models.torch.build import build_model
from hpcli.models.torch.moe import Experts
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import ParallelMesh
from hyper_parallel.core.mesh import LayoutError
from hyper_parallel.core.sharding import local_pieces, parameter_cuts
from hyper_parallel.platform.torch.expert_parallel import ExpertDispatch


def dispatched(experts: int, chosen: list[list[int]], dtype: str = "float32") -> dict[str, Any]:
    """Each rank's row i is 10 * rank + i + 1, and goes to expert ``chosen[rank][i]``, e of which multiplies by e + 1."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dispatch = ExpertDispatch(experts, dist.group.WORLD)
    mine = torch.tensor(chosen[rank], dtype=torch.int64)
    rows = (10.0 * rank + 1 + torch.arange(len(mine))).to(getattr(torch, dtype)).unsqueeze(1).requires_grad_()
    here = experts // world
    factors = torch.arange(rank * here + 1.0, rank * here + here + 1).to(rows.dtype).requires_grad_()
    arrived: list[float] = []

    def compute(rows_MD: torch.Tensor, counts: list[int]) -> torch.Tensor:
        arrived.extend(rows_MD.flatten().tolist())
        blocks = zip(rows_MD.split(counts), factors.unbind(), strict=True)
        return torch.cat([block * factor for block, factor in blocks])

    with Collectives() as forward:
        out = dispatch(rows, mine, compute)
    loss = out.sum()
    with Collectives() as backward:
        loss.backward()
    assert rows.grad is not None and factors.grad is not None
    return {
        "arrived": arrived,
        "counts": dispatch.counts,
        "out": out.flatten().tolist(),
        "rows gradient": rows.grad.flatten().tolist(),
        "factors gradient": factors.grad.tolist(),
        "collectives": (dict(forward.counts), dict(backward.counts)),
    }


def gradients(config: dict[str, Any], mesh: dict[str, int]) -> dict[str, Any]:
    """Of the first step: how far this rank's *shard* of a gradient is from the single process's, relative to that whole gradient, at
    most; a hash of each shard; which experts' gradients are zero; tokens that each had in the last micro-batch."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    batches = make_batches(settings)
    share = batches.share(1, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
    micro_batches = share.split(settings.training.micro_batch_size or len(share.inputs))
    loss = engine.accumulate(micro_batches, batches.valid_tokens(1), lambda phase: None)
    dist.all_reduce(loss)
    reference, reference_loss = _single_process(settings)
    whole = sum(float(gradient.square().sum()) for gradient in reference.values()) ** 0.5
    plan, rank = parallel_plan(settings), dist.get_rank()
    worst: dict[str, float] = {}
    shards, idle = {}, {}
    for name, parameter in engine.parameters.items():
        gradient = parameter.grad.to_local()
        cuts = parameter_cuts(plan, layout, name, rank)
        pieces = local_pieces(tuple(parameter.shape), cuts)
        expected = reference[name][tuple(slice(start, start + length) for start, length in pieces)]
        worst[name] = float((gradient.double() - expected).norm()) / float(reference[name].norm())
        shards[name] = (str(pieces), hashlib.sha256(gradient.contiguous().numpy().tobytes()).hexdigest())
        if plan.is_expert(name):
            idle[name] = [not own.any() for own in gradient]
            assert idle[name] == [not right.any() for right in expected], name
    counts = {
        name: module.dispatch.counts
        for part in engine.parts
        for name, module in part.named_modules()
        if isinstance(module, Experts)
    }
    report = engine.clip()
    return {
        "loss": float(loss),
        "reference loss": reference_loss,
        "norm": float(report.norm),
        "reference norm": whole,
        "worst": max((difference, name) for name, difference in worst.items()),
        "experts": sum(plan.is_expert(name) for name in worst),
        "shards": shards,
        "idle": idle,
        "counts": counts,
    }


def refused(config: dict[str, Any], mesh: dict[str, int], split: bool = True) -> str:
    """What a library user is told whose experts cannot be cut as the mesh says."""
    settings = Config.model_validate(config)
    plan = parallel_plan(settings)
    if not split:
        plan = type(plan)(layers=plan.layers, experts=plan.experts)
    try:
        hyper_parallel.parallelize(build_model(settings.model, 0), ParallelMesh(**mesh), plan)
    except (LayoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def several_steps(config: dict[str, Any], mesh: dict[str, int], steps: int) -> dict[str, Any]:
    """Losses and norms of ``steps`` updates, exactly, and the weights after them."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    batches = make_batches(settings)
    losses, norms = [], []
    for step in range(1, steps + 1):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        micro_batches = share.split(settings.training.micro_batch_size or len(share.inputs))
        result = engine.step(micro_batches, batches.valid_tokens(step), 1e-3, lambda phase: None)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = b"".join(p.detach().to_local().contiguous().numpy().tobytes() for p in engine.parts[0].parameters())
    return {"losses": losses, "norms": norms, "weights": hashlib.sha256(weights).hexdigest()}
