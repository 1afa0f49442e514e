"""The tensors of a training run, written and read by torch.distributed.checkpoint as safetensors.

Each rank writes the shards that it holds (of replicas, one rank does); a run on other ranks or another layout reads the
parts of them that it needs. Nothing is pickled into or unpickled from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from hpcli.checkpoint.errors import CheckpointError

Tensors = Mapping[str, torch.Tensor]


def placed_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``local``, this rank's shard of something shaped as ``parameter``, as a DTensor that shares its memory."""
    if not isinstance(parameter, DTensor):
        return local
    # from_local would copy an offloaded shard to the device of the mesh, and what is read into the copy would be lost
    return DTensor(local.detach(), parameter._spec, requires_grad=False)


def training_tensors(parameters: Tensors, optimizer_state: Tensors, tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Everything to be saved, under the names it has in a checkpoint: ``model.NAME`` and ``optimizer.SLOT.NAME``.

    Args:
        parameters: all parameters of this rank, frozen ones too, by their name in the whole model.
        optimizer_state: this rank's shards, by slot and parameter ("exp_avg.norm.weight").
        tied: names that stand for the same parameter as another.
    """
    tensors = {f"model.{tied.get(name, name)}": p.detach() for name, p in parameters.items()}
    for key, value in optimizer_state.items():
        slot, _, name = key.partition(".")
        tensors[f"optimizer.{slot}.{tied.get(name, name)}"] = placed_like(value, parameters[name])
    return tensors


def save_tensors(tensors: Tensors, folder: Path) -> None:
    """Write every rank's part of ``tensors`` into ``folder``, which exists on all ranks. All ranks must call it.

    Raises:
        CheckpointError: a rank could not write; on every rank alike, naming the ranks.
    """
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except dcp.CheckpointException as failure:
        raise CheckpointError(f"cannot write a checkpoint into {folder.parent}: {_reasons(failure)}") from failure


def load_tensors(tensors: Tensors, folder: Path) -> None:
    """Read ``tensors`` in place, whatever layout wrote them. All ranks must call it.

    Raises:
        CheckpointError: something is missing or damaged; on every rank alike.
    """
    try:
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except dcp.CheckpointException as failure:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {_reasons(failure)}") from failure


def _reasons(failure: Any) -> str:
    """What went wrong on which rank, without the tracebacks."""
    by_reason: dict[str, list[int]] = {}
    for rank, (error, _) in failure.failures.items():
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        by_reason.setdefault(text.strip().splitlines()[0], []).append(rank)
    return "; ".join(f"{reason} (rank {', '.join(map(str, ranks))})" for reason, ranks in by_reason.items())
