"""Bytes of each kind on a rank, as the engines hold them.

Shards are float32 master weights behind an all-gather that casts to ``compute_dtype``; a unit's reduced gradients are float32 views
of one buffer, padding included; AdamW keeps two float32 values an element and one count a parameter. Gradients of more than one
micro-batch, and all of a pipeline's, wait whole and unsharded until the last one, in the dtype of the reduction.

On MindSpore shards and their gradients are tensors of their own without padding, the counts are no tensors, and every unit is freed
after forward and after backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hpcli.config.schema import Config
from hpcli.models.stages import stage_shapes
from hpcli.models.vlm import image_tokens
from hpcli.plan.shards import HeldStage, HeldUnit, held_by, stages_on
from hpcli.train.precision import precision_policy
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.precision import ITEM_SIZES

SHARD_BYTES = ITEM_SIZES["float32"]
STEP_BYTES = ITEM_SIZES["float32"]  # AdamW's count of updates, one for each parameter
ACTIVE_STAGES = 3  # torch's pipeline runtime gathers the next stages in turn, and frees the others


class Memory(NamedTuple):
    """Bytes of each kind on one rank.

    Attributes:
        parameters, gradients, optimizer_state: of the shards; in host memory with offload.
        main_gradients: gradients of whole units, accumulated over micro-batches.
        working_set: unsharded parameters at the worst moment, the next unit's among them, and the gradients of one unit.
        activations: what backward needs of all micro-batches in flight.
        temporary: what comes and goes beside them while one micro-batch is computed, a recomputed layer among it.
        buffers: of collectives and pipeline transfers.
    """

    parameters: int
    gradients: int
    main_gradients: int
    optimizer_state: int
    working_set: int
    activations: int
    temporary: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


SHARDS = ("parameters", "gradients", "optimizer_state")
"""What offload keeps in host memory."""


def micro_batches(config: Config, mesh: ParallelMesh) -> int:
    """How many a data-parallel rank has in a step."""
    training = config.training
    share = training.global_batch_size // mesh.data_parallel_size
    return share // (training.micro_batch_size or share)


def rank_memory(config: Config, mesh: ParallelMesh, rank: int, activations: int = 0, temporary: int = 0) -> Memory:
    """What ``rank`` needs, wherever it is kept; ``activations`` and ``temporary`` are found elsewhere."""
    stages = held_by(config, mesh, rank)
    units = [unit for stage in stages for unit in stage.units]
    compute, reduce = _item_sizes(config)
    accumulates = mesh.pp > 1 or micro_batches(config, mesh) > 1
    padded = config.platform == "torch"
    return Memory(
        parameters=SHARD_BYTES * sum(unit.shard if padded else unit.held for unit in units),
        gradients=SHARD_BYTES * sum(unit.trainable_shard if padded else unit.trainable_held for unit in units),
        main_gradients=accumulates * reduce * sum(unit.trainable for unit in units),
        optimizer_state=sum(_optimizer_state(config, stage) for stage in stages),
        working_set=_unsharded(config, mesh, stages, compute) + compute * max(unit.trainable for unit in units),
        activations=activations,
        temporary=temporary,
        buffers=_fsdp_buffers(config, units, compute, reduce) + _transfers(config, mesh, stages, compute),
    )


def drawn_bytes(config: Config, mesh: ParallelMesh, rank: int) -> int:
    """Host memory while a rank builds its stages, which it draws whole in float32 before they are cut."""
    held = stages_on(config, mesh, mesh.coordinates(rank)["pp"]).stages
    return SHARD_BYTES * sum(prod(shape) for stage in held for shape in stage_shapes(config.model, stage).values())


def _item_sizes(config: Config) -> tuple[int, int]:
    policy = precision_policy(config)
    return ITEM_SIZES[policy.compute_dtype], ITEM_SIZES[policy.resolved_reduce_dtype]


def _optimizer_state(config: Config, stage: HeldStage) -> int:
    """The optimizer's state and, where the shards do not serve as such, master weights."""
    adamw = config.optimizer.name == "adamw"
    counts = adamw and config.platform == "torch"
    masters = precision_policy(config).storage_rounds_compute
    return SHARD_BYTES * (2 * adamw + masters) * stage.trained + STEP_BYTES * counts * stage.trained_parameters


def reshards_after_forward(config: Config, unit: HeldUnit) -> bool:
    """Whether a unit's parameters are freed between forward and backward: as told, else, on torch, all but the outermost unit's."""
    chosen = config.fsdp_config.reshard_after_forward
    return (config.platform != "torch" or not unit.root) if chosen is None else chosen


def _unsharded(config: Config, mesh: ParallelMesh, stages: Sequence[HeldStage], compute: int) -> int:
    """Bytes of unsharded parameters at the worst moment."""
    if mesh.pp > 1 and config.platform == "torch":  # its pipelines do not free them after backward
        whole = sorted((compute * sum(unit.gathered for unit in stage.units) for stage in stages), reverse=True)
        return sum(whole[:ACTIVE_STAGES])
    return max(_of_one_stage(config, stage.units, compute) for stage in stages)


def _of_one_stage(config: Config, units: Sequence[HeldUnit], compute: int) -> int:
    """What is kept through forward and backward, and the most of the others at once: those in use and the next one."""
    kept = [unit for unit in units if not reshards_after_forward(config, unit)]
    freed = [unit for unit in units if reshards_after_forward(config, unit)]
    worst = 0
    for at in range(max((unit.layers.stop for unit in freed), default=0)):
        active = sum(unit.gathered for unit in freed if at in unit.layers)
        worst = max(worst, active + next((unit.gathered for unit in freed if unit.layers.start > at), 0))
    return compute * (sum(unit.gathered for unit in kept) + worst)


def _fsdp_buffers(config: Config, units: Sequence[HeldUnit], compute: int, reduce: int) -> int:
    """The largest unit's: what the all-gather fills before it is copied out, in and out of the reduce-scatter, and shards on their
    way from the host."""
    offload = config.fsdp_config.enable_offload
    gather = max(compute * (unit.gathered + unit.sharded_inside * unit.ranks) * (unit.ranks > 1) for unit in units)
    scatter = max(reduce * (unit.trainable_gathered + unit.trainable_shard) for unit in units)
    on_the_way = max(SHARD_BYTES * unit.shard for unit in units) if offload else 0
    return gather + scatter + on_the_way


def _transfers(config: Config, mesh: ParallelMesh, stages: Sequence[HeldStage], compute: int) -> int:
    """A buffer for every micro-batch that a stage receives, and for every gradient that comes back."""
    if mesh.pp == 1:
        return 0
    received = sum((not stage.layers.first) + (not stage.layers.last) for stage in stages)
    return received * micro_batches(config, mesh) * compute * prod(hidden_shape(config, mesh))


def hidden_shape(config: Config, mesh: ParallelMesh) -> tuple[int, int, int]:
    """One micro-batch's hidden states on a rank, as they go from stage to stage: batch, positions, width."""
    training, model = config.training, config.model
    positions = training.seq_length + image_tokens(model)
    split = mesh.tp if config.parallelism.sequence_parallel else 1
    return training.micro_batch_size or 1, positions // split, model.hidden_size or 0
