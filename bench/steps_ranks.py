"""What each of the ranks does to measure steps: three ways to train the same model on the same text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import hyper_parallel
from hpcli.config.schema import Config
from hpcli.data.documents import load_documents
from hpcli.data.text import IGNORED, Batch, TextBatches
from hpcli.launch.context import RankContext
from hpcli.models.presets import PRESETS
from hpcli.models.torch.build import build_model
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel.core.mesh import ParallelMesh

MAX_NORM = 1.0


def run(context: RankContext, payload: dict[str, Any]) -> None:
    """Emits the seconds of every step on rank 0; the collectives of a step keep the ranks together."""
    hyper_parallel.init(init_method=context.init_method, rank=context.rank, world_size=context.world_size)
    config = Config.model_validate(
        {
            "model": {"preset": "decoder-tiny", **PRESETS["decoder-tiny"]},
            "training": {"global_batch_size": 8, "seq_length": 64, "max_norm": MAX_NORM},
        }
    )
    mesh = init_device_mesh("cpu", (context.world_size,))
    batches = TextBatches(load_documents(None), seq_length=64, batch_size=8, seed=0, shuffle=True)
    share = batches.share(1, context.rank, context.world_size)
    ways = {
        "first": _loop_written_first(build_model(config.model, 0), mesh, share),
        "hand": _best_by_hand(build_model(config.model, 0), mesh, share),
        "ours": _ours(config, context, batches),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(payload["rounds"] + 1):
        if context.rank == 0 and turn % 5 == 0:
            context.emit({"event": "progress", "text": f"round {turn} of {payload['rounds']}"})
        for name, step in ways.items():
            context.progress(turn + 1, "forward")
            dist.barrier()
            for _ in range(payload["steps"]):
                began = time.perf_counter()
                step()
                if turn:  # the first one warms up
                    seconds[name].append(time.perf_counter() - began)
    if context.rank == 0:
        context.emit({"event": "steps", "seconds": seconds})
    dist.barrier()
    dist.destroy_process_group()


def _loop_written_first(model: nn.Module, mesh: DeviceMesh, share: Batch) -> Callable[[], None]:
    """Every layer a unit, and every option as it comes."""
    for layer in model.layers.values():  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = _mean_loss(model, share)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        loss.item()

    return step


def _best_by_hand(model: nn.Module, mesh: DeviceMesh, share: Batch) -> Callable[[], None]:
    """One unit, a fused optimizer, and a clip that norms local shards with one all-reduce."""
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def step() -> None:
        loss = _mean_loss(model, share)
        loss.backward()
        with torch.no_grad():
            gradients = [parameter.grad._local_tensor for parameter in parameters]  # type: ignore[union-attr]
            total = torch.stack(torch._foreach_norm(gradients)).square().sum()
            dist.all_reduce(total)
            torch._foreach_mul_(gradients, (MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def _mean_loss(model: nn.Module, share: Batch) -> torch.Tensor:
    logits_BTV = model(torch.from_numpy(share.inputs))
    labels_BT = torch.from_numpy(share.labels)
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED)


def _ours(config: Config, context: RankContext, batches: TextBatches) -> Callable[[], None]:
    """As ``hpcli train`` does it, with the choice of the batch."""
    engine = TorchEngine(config, ParallelMesh(dp_shard=context.world_size), "cpu")
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        share = batches.share(number, context.rank, context.world_size)
        engine.step([share], batches.valid_tokens(number), 1e-3, lambda phase: context.progress(number, phase))

    return step
