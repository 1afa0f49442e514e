"""What one process computes for a layout: the reference of check-norm.

It uses the models and nothing else of the library: neither the clip nor its norm, no sharding, no process group. In float32
every sequence's gradient is added up in float64. In low precision the layout's own split of the batch is replayed, in the
dtypes of its policy, since what a right run gives there depends on where it rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hpcli.check.batch import check_batches
from hpcli.config.schema import Config
from hpcli.data.text import IGNORED, Batch
from hpcli.launch.context import RankContext
from hpcli.models.torch.build import build_model

Gradients = dict[str, torch.Tensor]

VARIANTS = ("right", "last_micro_batch", "mean_of_means")
"""The gradient, and what two common mistakes would make of it: only the last micro-batch of every rank; the mean over
micro-batches and ranks of their own means."""


def run(context: RankContext, payload: dict[str, Any]) -> None:
    """Write the references of ``payload["layouts"]`` (config, data_parallel) into ``payload["folder"]``, this rank's share
    of them, and tell their losses."""
    torch.set_num_threads(1)
    for number, layout in enumerate(payload["layouts"]):
        if number % context.world_size == context.rank:
            context.progress(number, "build")
            config = Config.model_validate(layout["config"])
            try:
                loss = write_reference(config, layout["data_parallel"], Path(payload["folder"]) / f"{number}.npz")
            except Exception as error:  # noqa: BLE001 (it fails this layout, and the others go on)
                context.emit({"layout": number, "error": f"{type(error).__name__}: {error}"})
            else:
                context.emit({"layout": number, "loss": loss})


def write_reference(config: Config, data_parallel: int, path: Path) -> float:
    """The gradients of every parameter in every variant, float64, as ``VARIANT/NAME``; returns the loss."""
    split = _split(config, data_parallel)
    valid = sum(int((batch.labels != IGNORED).sum()) for share in split for batch in share)
    native = config.training.compute_dtype != "float32"
    replay = _replayed if native else _in_float64
    right, loss = replay(config, [[(batch, valid) for batch in share] for share in split])
    last, _ = _in_float64(config, [[(share[-1], valid)] for share in split])
    parts = [batch for share in split for batch in share]
    means, _ = _in_float64(config, [[(batch, _valid(batch) * len(parts)) for batch in parts]])
    arrays: dict[str, Any] = {
        f"{variant}/{name}": gradient.double().numpy()
        for variant, gradients in zip(VARIANTS, (right, last, means), strict=True)
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
    return max(1, int((batch.labels != IGNORED).sum()))


Work = Sequence[Sequence[tuple[Batch, int]]]


def _in_float64(config: Config, work: Work) -> tuple[Gradients, float]:
    """Gradients in float32, of one sequence at a time, added up in float64."""
    model = build_model(config.model, config.training.seed)
    sums: Gradients = {}
    loss = 0.0
    for batch, divisor in _flat(work):
        for sequence in batch.split(1):
            loss += _backward(model, sequence, divisor)
            for name, gradient in _taken(model):
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + gradient.double()
    return sums, loss


def _replayed(config: Config, work: Work) -> tuple[Gradients, float]:
    """The same micro-batches and ranks, rounded where the run rounds: storage, computation, accumulation, reduction."""
    training = config.training
    compute = getattr(torch, training.compute_dtype)
    reduce = torch.float32 if training.accumulate_allreduce_grads_in_fp32 else compute
    model = build_model(config.model, config.training.seed)
    model = model.to(getattr(torch, training.params_dtype)).to(compute)
    sums: Gradients = {}
    loss = 0.0
    for share in work:
        of_rank: Gradients = {}
        for batch, divisor in share:
            loss += _backward(model, batch, divisor)
            for name, gradient in _taken(model):
                gradient = gradient.to(reduce)
                of_rank[name] = gradient if name not in of_rank else of_rank[name] + gradient
        for name, gradient in of_rank.items():
            sums[name] = gradient if name not in sums else sums[name] + gradient
    return sums, loss


def _flat(work: Work) -> Iterator[tuple[Batch, int]]:
    for share in work:
        yield from share


def _backward(model: torch.nn.Module, batch: Batch, divisor: int) -> float:
    logits = model(*map(torch.from_numpy, batch.model_inputs()))
    labels = torch.from_numpy(batch.labels).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum") / divisor
    loss.backward()
    return float(loss.detach())


def _taken(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad
            parameter.grad = None
