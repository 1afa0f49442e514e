"""Rank programs: what a rank really holds after steps of training, to be compared with what was planned."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import ParallelMesh


def held(config: dict[str, Any], mesh: dict[str, int]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state in this rank's memory, each allocation once."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    training = settings.training
    batches = make_batches(settings)
    for step in (1, 2):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        engine.accumulate(share.split(training.micro_batch_size or 1), batches.valid_tokens(step), lambda phase: None)
        gradients = _bytes([p.grad for module in engine.parts for p in module.parameters() if p.grad is not None])
        engine.clip()
        engine.update(1e-3)
        engine.zero_grad()
    state = [value for known in engine.optimizer.inner.state.values() for value in known.values()]
    masters = engine.optimizer.masters if engine.optimizer.storage else []
    return {
        "parameters": _bytes([p for module in engine.parts for p in module.parameters()]),
        "gradients": gradients,
        "optimizer_state": _bytes([value for value in [*state, *masters] if isinstance(value, torch.Tensor)]),
    }


def _bytes(tensors: list[Any]) -> int:
    held = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        held[storage._cdata] = storage.nbytes()
    return sum(held.values())
