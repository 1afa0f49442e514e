"""What one process computes for a layout: the reference of check-norm.

It uses the models and, but for a device's name, nothing else of the library: neither the clip nor its norm, no sharding, no
process group. In float32 every sequence's gradient is added up in float64. In low precision the layout's own split of the batch is replayed, in the
dtypes of its policy and on its device, since what a right run gives there depends on where it rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hpcli.check.batch import check_batches
from hpcli.config.schema import Config, LossScale
from hpcli.data.text import IGNORED, Batch
from hpcli.launch.context import RankContext
from hpcli.models.torch.build import build_model
from hyper_parallel.platform.torch.mesh import torch_device_type

Gradients = dict[str, torch.Tensor]
Weights = dict[str, float]

VARIANTS = ("right", "last_micro_batch", "mean_of_means")
"""The gradient, and what two common mistakes would make of it: only the last micro-batch of every rank; the mean over
micro-batches and ranks of their own means."""


def run(context: RankContext, payload: dict[str, Any]) -> None:
    """Write the references of ``payload["layouts"]`` (config, data_parallel) for ``payload["device"]`` into
    ``payload["folder"]``, this rank's share of them, and tell their losses."""
    torch.set_num_threads(1)
    device = torch.device(torch_device_type(payload["device"]))
    for number, layout in enumerate(payload["layouts"]):
        if number % context.world_size == context.rank:
            context.progress(number, "build")
            config = Config.model_validate(layout["config"])
            path = Path(payload["folder"]) / f"{number}.npz"
            try:
                loss = write_reference(config, layout["data_parallel"], path, device)
            except OSError as error:
                told = f"cannot write to {payload['folder']}: {error.strerror or error}; TMPDIR names another place for it"
                context.emit({"layout": number, "error": told})
            except Exception as error:  # noqa: BLE001 (it fails this layout, and the others go on)
                context.emit({"layout": number, "error": f"{type(error).__name__}: {error}"})
            else:
                context.emit({"layout": number, "loss": loss})


def write_reference(
    config: Config, data_parallel: int, path: Path, device: torch.device = torch.device("cpu")  # noqa: B008 (immutable)
) -> float:
    """The gradients of every parameter in every variant, float64, as ``VARIANT/NAME``; returns the loss."""
    split = _split(config, data_parallel)
    parts = [batch for share in split for batch in share]
    valid = sum(_valid(batch) for batch in parts)
    weighted: list[tuple[Batch, Weights]] = [
        (
            batch,
            {
                "right": 1.0,
                "last_micro_batch": float(batch is share[-1]),
                "mean_of_means": valid / (max(1, _valid(batch)) * len(parts)),
            },
        )
        for share in split
        for batch in share
    ]
    variants, loss = _in_float64(config, weighted, valid)
    if config.training.compute_dtype != "float32":
        variants["right"], loss = _replayed(config, split, valid, device)
    arrays: dict[str, Any] = {
        f"{variant}/{name}": gradient.cpu().double().numpy()
        for variant, gradients in variants.items()
        for name, gradient in gradients.items()
    }
    np.savez(path, **arrays)
    return loss


def read_reference(path: Path) -> dict[str, dict[str, Any]]:
    """Variant -> name -> gradient, float64."""
    gradients: dict[str, dict[str, Any]] = {variant: {} for variant in VARIANTS}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            variant, _, name = key.partition("/")
            gradients[variant][name] = arrays[key]
    return gradients


def _split(config: Config, data_parallel: int) -> list[list[Batch]]:
    """The micro-batches of every data-parallel rank."""
    batches = check_batches(config)
    shares = (batches.share(1, index, data_parallel) for index in range(data_parallel))
    return [share.split(config.training.micro_batch_size or len(share.inputs)) for share in shares]


def _valid(batch: Batch) -> int:
    return int((batch.labels != IGNORED).sum())


def _in_float64(
    config: Config, work: Sequence[tuple[Batch, Weights]], valid: int
) -> tuple[dict[str, Gradients], float]:
    """For each variant the weighted sum of the sequences' gradients: each is computed in float32, once, by itself, and added up
    in float64. The loss is divided by ``valid`` before backward, as in a run, which rounds there."""
    model = build_model(config.model, config.training.seed)
    sums: dict[str, Gradients] = {variant: {} for variant in VARIANTS}
    loss = 0.0
    for batch, weights in work:
        for sequence in batch.split(1):
            loss += _backward(model, sequence, valid)
            for name, gradient in _taken(model):
                wide = gradient.double()
                for variant, gradients in sums.items():
                    if name not in gradients:
                        gradients[name] = torch.zeros_like(wide)
                    gradients[name].add_(wide, alpha=weights[variant])
    return sums, loss


def _replayed(
    config: Config, split: Sequence[Sequence[Batch]], valid: int, device: torch.device
) -> tuple[Gradients, float]:
    """The same micro-batches and ranks, rounded where the run rounds: storage, computation, accumulation, reduction. In float16 the
    loss is scaled as in the run's first step, without which small gradients would be lost."""
    training = config.training
    compute = getattr(torch, training.compute_dtype)
    scale = (training.loss_scale or LossScale()).initial if compute == torch.float16 else 1.0
    reduce = torch.float32 if training.accumulate_allreduce_grads_in_fp32 else compute
    model = build_model(config.model, config.training.seed)
    model = model.to(getattr(torch, training.params_dtype)).to(device, compute)
    sums: Gradients = {}
    loss = 0.0
    for share in split:
        of_rank: Gradients = {}
        for batch in share:
            loss += _backward(model, batch, valid, scale)
            for name, gradient in _taken(model):
                gradient = gradient.to(reduce)
                of_rank[name] = gradient if name not in of_rank else of_rank[name] + gradient
        for name, gradient in of_rank.items():
            sums[name] = gradient if name not in sums else sums[name] + gradient
    return {name: gradient.cpu().double() / scale for name, gradient in sums.items()}, loss


def _backward(model: torch.nn.Module, batch: Batch, divisor: int, scale: float = 1.0) -> float:
    device = next(model.parameters()).device
    logits = model(*(torch.from_numpy(array).to(device) for array in batch.model_inputs()))
    labels = torch.from_numpy(batch.labels).flatten().to(device)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum") / divisor
    (loss * scale).backward()
    return float(loss.detach())


def _taken(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad
            parameter.grad = None
