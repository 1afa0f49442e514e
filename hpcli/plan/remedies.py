"""What would make a configuration need less, each change tried through the validator that every command uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hpcli.config.schema import Config
from hpcli.plan.estimate import Plan
from hpcli.plan.memory import micro_batches
from hyper_parallel.core.mesh import ParallelMesh

WORTH_SAYING = 0.99
"""A change is told where the new total is at most this share of the old one."""
MOST_TOGETHER = 4

Change = dict[str, object]
Try = Callable[[Change], "Plan | None"]


class Remedy(NamedTuple):
    """A change of the configuration, as text and as keys, with the plan that it makes."""

    text: str
    change: Change
    plan: Plan


def remedies(plan: Plan, attempt: Try) -> list[Remedy]:
    """Changes that bring the need of device memory down, the best first. Where a switch is enough, no other mesh is tried.

    Args:
        attempt: the plan with some keys changed; None where that is refused.
    """
    found = _worthwhile(plan, attempt, _switches(plan.config))
    if not (plan.fits or any(remedy.plan.fits for remedy in found)):
        found += _worthwhile(plan, attempt, _meshes(plan.config, plan.mesh))
    found.sort(key=lambda remedy: remedy.plan.worst.device)
    if found and not (plan.fits or any(remedy.plan.fits for remedy in found)):
        together = _together(found, attempt)
        if together is not None:
            found.insert(0, together)
    return found


def _worthwhile(plan: Plan, attempt: Try, changes: Iterator[tuple[str, Change]]) -> list[Remedy]:
    tried = ((text, change, attempt(change)) for text, change in changes)
    return [
        Remedy(text, change, made)
        for text, change, made in tried
        if made is not None and made.worst.device <= WORTH_SAYING * plan.worst.device
    ]


def _together(found: list[Remedy], attempt: Try) -> Remedy | None:
    """The best changes one after the other until the plan fits; those of one key exclude each other."""
    taken = found[0]
    for other in found[1:]:
        if taken.plan.fits or len(taken.change) >= MOST_TOGETHER:
            break
        if set(other.change) & set(taken.change):
            continue
        change = taken.change | other.change
        made = attempt(change)
        if made is not None and made.worst.device <= WORTH_SAYING * taken.plan.worst.device:
            taken = Remedy(f"{taken.text} + {other.text}", change, made)
    return taken if taken.plan.fits else None


def _switches(config: Config) -> Iterator[tuple[str, Change]]:
    training, fsdp = config.training, config.fsdp_config
    if not fsdp.enable_offload:
        yield "offload", {"fsdp_config.enable_offload": True}
    if training.compute_dtype == "float32":
        yield "compute in bfloat16", {"training.compute_dtype": "bfloat16"}
    elif training.accumulate_allreduce_grads_in_fp32:
        yield (
            f"accumulate and reduce gradients in {training.compute_dtype}",
            {"training.accumulate_allreduce_grads_in_fp32": False},
        )
    if training.activation_checkpointing == "none":
        yield "activation checkpointing", {"training.activation_checkpointing": "full"}
    size = training.micro_batch_size or 1
    if size % 2 == 0:
        yield f"micro-batches of {size // 2}", {"training.micro_batch_size": size // 2}
    if fsdp.reshard_after_forward is not True:
        yield "reshard after forward", {"fsdp_config.reshard_after_forward": True}
    if fsdp.unit != "layer":
        yield "a sharded unit for each layer", {"fsdp_config.unit": "layer"}


def _meshes(config: Config, mesh: ParallelMesh) -> Iterator[tuple[str, Change]]:
    for key, name in (("pipeline_parallel", "pipeline"), ("tensor_parallel", "tensor")):
        degree = getattr(config.parallelism, key)
        change = _rearranged(config, mesh, key)
        if change:
            yield f"{name} parallel {2 * degree}, over half as many data-parallel ranks", change
    yield (
        f"twice the ranks ({2 * mesh.world_size:,}) and batch",
        {
            "launch.ranks": 2 * mesh.world_size,
            "parallelism.data_parallel_shard": 2 * mesh.dp_shard,
            "training.global_batch_size": 2 * config.training.global_batch_size,
        },
    )


def _rearranged(config: Config, mesh: ParallelMesh, key: str) -> Change | None:
    """Twice the degree of ``key``, taken out of the sharded data parallelism; each rank's share of the batch doubles."""
    if mesh.dp_shard % 2:
        return None
    change: Change = {f"parallelism.{key}": 2 * getattr(config.parallelism, key), "parallelism.data_parallel_shard": mesh.dp_shard // 2}
    if mesh.ep > 1 and mesh.dp_shard // 2 % mesh.ep:
        change["parallelism.expert_parallel"] = mesh.ep // 2
    if micro_batches(config, mesh) == 1:  # keep what is computed at once
        change["training.micro_batch_size"] = config.training.micro_batch_size or 1
    return change
