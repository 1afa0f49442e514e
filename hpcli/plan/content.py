"""What a plan says, as plain data: the JSON of ``hpcli plan --json``, from which every other form is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcli.config.validate import ResolvedConfig
from hpcli.models.description import describe_model
from hpcli.plan.activations import FakeRuns
from hpcli.plan.communication import Traffic, traffic
from hpcli.plan.estimate import ClassNeeds, Plan, class_of
from hpcli.plan.groups import axes, example_group, link
from hpcli.plan.memory import SHARDS, drawn_bytes, micro_batches
from hpcli.plan.remedies import Remedy
from hyper_parallel.core.pipeline_parallel import Timeline
from hyper_parallel.core.pipeline_parallel.simulate import simulate

ASSUMPTIONS = (
    "activations: from forward and backward of a micro-batch through the real modules, without memory",
    "tokens go evenly to the experts; backward takes twice as long as forward",
    "no allocator's fragmentation, no framework's own memory: leave some of the device free",
)
ASSUMED_ON_MINDSPORE = (
    "activations and the collectives inside layers are those of the same model in torch's modules",
    "a unit's gradients are counted as one reduce-scatter; without comm_fusion there is one for each parameter",
)
RECOMPUTED_FOR_WEIGHTS = (
    "NOT COUNTED: torch computes a recomputed layer again for each group of weights in a late backward,",
    "with its collectives; a zero-bubble schedule and activation checkpointing cost much time together",
)


def content(
    plan: Plan, resolved: ResolvedConfig, config_file: Path, rank: int | None, found: list[Remedy], runs: FakeRuns
) -> dict[str, Any]:
    """Everything that is told, in bytes."""
    config, mesh = plan.config, plan.mesh
    shown = plan.worst if rank is None else class_of(plan, rank)
    example = shown.ranks.example if rank is None else rank
    sent = traffic(config, mesh, example, plan.pipeline, runs)
    model = describe_model(config.model)
    return {
        "config_file": str(config_file),
        "fits": plan.fits,
        "world_size": mesh.world_size,
        "mesh": {axis: getattr(mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "ep", "tp")},
        "axes": axes(mesh, plan.limits.ranks_per_host),
        "ranks_per_host": plan.limits.ranks_per_host,
        "model": config.model.preset,
        "parameters": sum(_product(spec.shape) for spec in model.values()),
        "platform": config.platform,
        "micro_batches": micro_batches(config, mesh),
        "micro_batch_size": config.training.micro_batch_size,
        "seq_length": config.training.seq_length,
        "dtypes": {"params": config.training.params_dtype, "compute": config.training.compute_dtype},
        "limits": {"device": plan.limits.device, "host": plan.limits.host},
        "needs": {"device": plan.worst.device, "host": plan.host_total},
        "classes": [_class(needs) for needs in plan.classes],
        "shown": _class(shown) | {"rank": example, "coordinates": mesh.coordinates(example)},
        "remedies": [_remedy(remedy) for remedy in found],
        "communication": [_sent(one, plan, example) for one in sent],
        "pipeline": None if plan.pipeline is None else _pipeline(plan),
        "drawing_on_host": drawn_bytes(config, mesh, example) * min(plan.limits.ranks_per_host, mesh.world_size),
        "notices": list(resolved.notices),
        "assumptions": _assumptions(plan),
    }


def _assumptions(plan: Plan) -> list[str]:
    told = [*ASSUMPTIONS]
    if plan.config.platform == "mindspore":
        told += ASSUMED_ON_MINDSPORE
    recomputes = plan.config.training.activation_checkpointing == "full"
    if recomputes and plan.pipeline is not None and plan.pipeline.schedule.split_backwards:
        told += RECOMPUTED_FOR_WEIGHTS
    return told


def timeline_of(plan: Plan) -> Timeline | None:
    """The schedule in time; None without a pipeline."""
    return None if plan.pipeline is None else simulate(plan.pipeline.schedule)


def _product(shape: tuple[int, ...]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements


def _class(needs: ClassNeeds) -> dict[str, Any]:
    ranks = needs.ranks
    memory = needs.memory._asdict()
    return {
        "ranks": ranks.ranks,
        "example": ranks.example,
        "pp": list(ranks.pp),
        "dp_shard": [ranks.dp_shard.start, ranks.dp_shard.stop],
        "tp": [ranks.tp.start, ranks.tp.stop],
        "device": {kind: size * (not needs.offload or kind not in SHARDS) for kind, size in memory.items()},
        "host": {kind: memory[kind] * needs.offload for kind in SHARDS},
        "never_at_once": needs.never_at_once,
        "device_total": needs.device,
        "host_total": needs.host,
    }


def _remedy(remedy: Remedy) -> dict[str, Any]:
    plan = remedy.plan
    return {
        "text": remedy.text,
        "change": remedy.change,
        "device": plan.worst.device,
        "host": plan.host_total,
        "fits": plan.fits,
    }


def _sent(one: Traffic, plan: Plan, rank: int) -> dict[str, Any]:
    group = example_group(plan.mesh, one.axis, rank)
    return one._asdict() | {"volume": one.volume, "link": link(group, plan.limits.ranks_per_host)}


def _pipeline(plan: Plan) -> dict[str, Any]:
    timeline = timeline_of(plan)
    assert timeline is not None and plan.pipeline is not None
    return {
        "schedule": plan.pipeline.schedule.name,
        "stages": plan.pipeline.schedule.stage_count,
        "micro_batches": plan.pipeline.schedule.micro_batches,
        "bubble_share": timeline.bubble_share,
        "peak_in_flight": list(timeline.peak_in_flight),
    }
