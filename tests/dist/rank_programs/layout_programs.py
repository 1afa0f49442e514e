"""Rank programs: the gradients of a layout beside those of the same model in one process."""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.models.torch.build import build_model
from hpcli.train.torch_engine import TorchEngine
from hpcli.train.torch_loss import token_loss
from hyper_parallel import ParallelMesh


def gradients(config: dict[str, Any], mesh: dict[str, int], steps: int = 1) -> dict[str, Any]:
    """The first step's loss, norm and largest relative difference of a gradient from the single process's, in float64; then the
    norms of further steps."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    batches = make_batches(settings)
    losses, norms = [], []
    told: dict[str, Any] = {}
    for step in range(1, steps + 1):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        micro_batches = share.split(settings.training.micro_batch_size or len(share.inputs))
        loss = engine.accumulate(micro_batches, batches.valid_tokens(step), lambda phase: None)
        dist.all_reduce(loss)
        losses.append(float(loss))
        if step == 1:
            told = _compared(engine, settings)
        norms.append(float(engine.clip().norm))
        engine.update(1e-3)
        engine.zero_grad()
    return told | {"losses": losses, "norms": norms, "norm_bits": struct.pack("<d", norms[0]).hex()}


def _compared(engine: TorchEngine, settings: Config) -> dict[str, Any]:
    reference, loss = _single_process(settings)
    whole = sum(float(gradient.square().sum()) for gradient in reference.values()) ** 0.5
    worst, name_of_worst = 0.0, ""
    for name, parameter in engine.parameters.items():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        expected = reference[name if name in reference else "embedding.weight"]
        difference = float((gradient.double() - expected).norm()) / (float(expected.norm()) + 1e-2 * whole)
        if difference > worst:
            worst, name_of_worst = difference, name
    return {"worst": worst, "name": name_of_worst, "reference_norm": whole, "reference_loss": loss}


def _single_process(settings: Config) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients accumulated in float64 over the sequences of the first global batch, one by one, and the loss."""
    model = build_model(settings.model, settings.training.seed)
    batches = make_batches(settings)
    valid = batches.valid_tokens(1)
    total = 0.0
    gradients: dict[str, torch.Tensor] = {}
    for batch in batches.share(1, 0, 1).split(1):
        loss = token_loss(model(*map(torch.from_numpy, batch.model_inputs())), torch.from_numpy(batch.labels)) / valid
        loss.backward()
        total += float(loss.detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0.0) + parameter.grad.double()
                parameter.grad = None
    return gradients, total
