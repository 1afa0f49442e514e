"""What `hpcli validate` says about a configuration that can run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcli.report.formats import count_text
from hpcli.report.header import mesh_text

if TYPE_CHECKING:
    from hpcli.config.validate import ResolvedConfig


def layout_json(config_file: Path, resolved: ResolvedConfig) -> dict[str, Any]:
    """The resolved layout, and the whole configuration with everything filled in, as JSON can hold them."""
    return {
        "valid": True,
        "config_file": str(config_file),
        "world_size": resolved.world_size,
        "mesh": _mesh(resolved),
        "batch": _batch(resolved),
        "dtypes": _dtypes(resolved),
        "notices": list(resolved.notices),
        "config": resolved.config.model_dump(mode="json"),
    }


def layout_lines(config_file: Path, resolved: ResolvedConfig) -> list[str]:
    """The same for a person, a line each."""
    batch, dtypes, config = _batch(resolved), _dtypes(resolved), resolved.config
    sequences = count_text(batch["global_batch_size"], "sequence")
    ranks = count_text(batch["data_parallel_ranks"], "data-parallel rank")
    micro_batches = count_text(batch["micro_batches"], "micro-batch", "micro-batches")
    steps, tokens = count_text(config.training.steps, "step"), count_text(batch["tokens_per_step"], "token")
    return [
        f"{config_file} is valid",
        f"  platform  {config.platform}, device {config.device}",
        f"  mesh      {mesh_text(_mesh(resolved), resolved.world_size)}",
        f"  batch     {sequences} a step = {ranks} x {micro_batches} of {batch['micro_batch_size']:,}",
        f"  work      {steps}, {tokens} a step",
        f"  dtypes    params {dtypes['params']}, compute {dtypes['compute']}, reduce {dtypes['reduce']}",
        *(f"  note      {notice}" for notice in resolved.notices),
    ]


def _mesh(resolved: ResolvedConfig) -> dict[str, int]:
    mesh = resolved.mesh
    return {axis: int(getattr(mesh, axis)) for axis in ("pp", "dp_replicate", "dp_shard", "ep", "tp")}


def _batch(resolved: ResolvedConfig) -> dict[str, int]:
    training, ranks = resolved.config.training, resolved.mesh.data_parallel_size
    per_rank = training.global_batch_size // ranks
    micro_batch_size = training.micro_batch_size or per_rank
    return {
        "global_batch_size": training.global_batch_size,
        "data_parallel_ranks": ranks,
        "sequences_per_rank": per_rank,
        "micro_batch_size": micro_batch_size,
        "micro_batches": per_rank // micro_batch_size,
        "tokens_per_step": training.global_batch_size * training.seq_length,
    }


def _dtypes(resolved: ResolvedConfig) -> dict[str, str]:
    training = resolved.config.training
    fp32 = training.accumulate_allreduce_grads_in_fp32
    return {
        "params": training.params_dtype,
        "compute": training.compute_dtype,
        "reduce": "float32" if fp32 else training.compute_dtype,
    }
