"""Whether the values of a configuration fit together, and what those left open become."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpcli.config.availability import NOT_YET
from hpcli.config.errors import ConfigError, Problem
from hpcli.config.field_types import LARGEST_WORLD
from hpcli.config.load import LoadedConfig
from hpcli.config.rules import check_rules
from hpcli.config.schema import Config, ModelSection
from hpcli.models.description import known
from hpcli.models.presets import complete, without_effect
from hpcli.models.vlm import image_tokens
from hyper_parallel.core.mesh import (
    CONFIG_KEYS,
    FILL,
    LayoutError,
    LayoutProblem,
    ParallelMesh,
    check_batch,
    check_experts,
    check_transformer,
    resolve_mesh,
)
from hyper_parallel.core.pipeline_layout import ZERO_BUBBLE_SCHEDULES, check_micro_batches

MISSING_DEVICE = "there is no such device on this machine (`hpcli doctor` shows what is missing)"


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration that can run.

    `config` leaves nothing open except what the engine decides; `file` is the path as the user wrote it, and
    `notices` says what was decided for the user and is worth knowing.
    """

    config: Config
    mesh: ParallelMesh
    world_size: int
    file: str
    notices: list[str] = field(default_factory=list)


def resolve_config(
    loaded: LoadedConfig,
    *,
    ranks: int | None,
    launcher_world_size: int | None = None,
    device_count: int | None = None,
) -> ResolvedConfig:
    """Fit the layout to the ranks, fill in the model's preset, and check every combination.

    Args:
        loaded: What `load_config` returned.
        ranks: The command line's `--ranks`, which wins over the file.
        launcher_world_size: The ranks that torchrun, srun or msrun started, if one did.
        device_count: Accelerators on this machine; None if not known, which `device: auto` reads as none.

    Raises:
        ConfigError: with every problem found.
    """
    config = loaded.config
    on_cpu = config.device == "cpu" or (config.device == "auto" and not device_count)
    problems = list(_check_ranks(ranks, launcher_world_size))
    ranks_are_clear = not problems
    if config.device in ("cuda", "npu") and device_count == 0:
        message = f"{config.device}: {MISSING_DEVICE}; write auto or cpu"
        problems.append(loaded.problem("device", message))
    notices: list[str] = []
    mesh = None
    if ranks_are_clear:
        try:
            mesh = _resolve_layout(loaded, ranks or launcher_world_size, 0 if on_cpu else device_count or 0)
        except LayoutError as error:
            problems += [_located(loaded, problem) for problem in error.problems]
    config = _fill_in(loaded, mesh, on_cpu, notices)
    found = [
        LayoutProblem(f"model.{key}", getattr(config.model, key), f"has no effect: {reason}")
        for key, reason in without_effect(config.model.preset, _sizes(loaded.config.model)).items()
    ]
    found += check_rules(config, on_cpu=on_cpu)
    if mesh is not None:
        training = config.training
        uneven = check_batch(mesh, training.global_batch_size, training.micro_batch_size)
        found += uneven
        if mesh.pp > 1 and not uneven:
            found += _check_schedule_fits(config, mesh)
        found += _check_sizes(config, mesh)
    problems += [_located(loaded, problem) for problem in found]
    for entry in NOT_YET:
        if entry.asked(config):
            value = _written(config, entry.key)
            message = f"{value} is not available in this version, {entry.has}"
            problems.append(loaded.problem(entry.key, message))
    if problems or mesh is None:
        raise ConfigError(problems)
    if training.micro_batch_size is None:
        share = training.global_batch_size // mesh.data_parallel_size
        config = _with(config, {"training": {"micro_batch_size": share}})
    return ResolvedConfig(config, mesh, mesh.world_size, loaded.file, notices)


def _check_ranks(ranks: int | None, launcher_world_size: int | None) -> Iterator[Problem]:
    if ranks is not None and not 1 <= ranks <= LARGEST_WORLD:
        yield Problem(f"--ranks {ranks}", None, None, "", f"a run has from 1 to {LARGEST_WORLD} ranks")
    elif ranks is not None and launcher_world_size is not None and ranks != launcher_world_size:
        yield Problem(
            f"--ranks {ranks}",
            None,
            None,
            "",
            f"the launcher has started {launcher_world_size} ranks; leave --ranks out, or change the "
            f"launcher's number",
        )


def _resolve_layout(loaded: LoadedConfig, ranks: int | None, device_count: int) -> ParallelMesh:
    """The mesh, from the first of: `ranks`, launch.ranks, the degrees, the devices."""
    degrees = loaded.config.parallelism
    shard = degrees.data_parallel_shard
    world_size = ranks or loaded.config.launch.ranks
    open_ended = shard is None or shard == FILL
    if world_size is None and open_ended and device_count:
        world_size = device_count
    if world_size is None and shard == FILL:
        raise LayoutError(
            [
                LayoutProblem(
                    "data_parallel_shard",
                    FILL,
                    "-1 takes the ranks that the other degrees leave, and nothing says how many ranks there "
                    "are; "
                    "give --ranks N, set launch.ranks, or write the number here",
                )
            ]
        )
    sizes = {
        "pp": degrees.pipeline_parallel,
        "dp_replicate": degrees.data_parallel_replicate,
        "ep": degrees.expert_parallel,
        "tp": degrees.tensor_parallel,
    }
    if world_size is None:
        return ParallelMesh(dp_shard=1 if shard is None else shard, **sizes)
    return resolve_mesh(world_size, dp_shard=FILL if shard is None else shard, **sizes)


def _fill_in(loaded: LoadedConfig, mesh: ParallelMesh | None, on_cpu: bool, notices: list[str]) -> Config:
    config = loaded.config
    model, parallelism, fsdp = config.model, config.parallelism, config.fsdp_config
    changes: dict[str, dict[str, Any]] = {
        "model": {**complete(model.preset, _sizes(model))},
        "parallelism": {},
        "fsdp_config": {},
        "launch": {},
        "data": {},
    }
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_interleave_num is None:
        stages = 1 if schedule in ("gpipe", "1f1b") else 2
        changes["parallelism"]["pipeline_parallel_interleave_num"] = stages
    if mesh is not None:
        changes["parallelism"]["data_parallel_shard"] = mesh.dp_shard
        changes["launch"]["ranks"] = mesh.world_size
    if fsdp.pin_memory is None:
        changes["fsdp_config"]["pin_memory"] = not on_cpu
    if fsdp.reshard_after_forward is None and schedule in ZERO_BUBBLE_SCHEDULES:
        changes["fsdp_config"]["reshard_after_forward"] = False
        notices.append(
            f"fsdp_config.reshard_after_forward is false, because {schedule} is a zero-bubble schedule "
            "and needs the parameters again in its late weight gradients"
        )
    if config.data.path is not None:
        changes["data"]["path"] = os.path.abspath(os.path.expanduser(config.data.path))
    if config.optimizer.name == "sgd":
        unused = [key for key in ("betas", "eps") if loaded.is_set(f"optimizer.{key}")]
        notices += [
            f"optimizer.{key} has no effect: it belongs to adamw, and the optimizer is sgd" for key in unused
        ]
    return _with(config, changes)


def _sizes(model: ModelSection) -> dict[str, Any]:
    return {key: value for key, value in model.model_dump().items() if key not in ("preset", "freeze")}


def _with(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    return config.model_copy(update=sections)


def _check_sizes(config: Config, mesh: ParallelMesh) -> list[LayoutProblem]:
    model, training, parallelism = config.model, config.training, config.parallelism
    interleave = parallelism.pipeline_parallel_interleave_num or 1
    problems = check_transformer(
        mesh,
        num_layers=known(model.num_layers),
        cut=_cut_by_tensor_parallelism(model),
        sequence=training.seq_length,
        image_positions=image_tokens(model),
        vocabulary=known(model.vocab_size),
        sequence_parallel=parallelism.sequence_parallel,
        interleave=interleave,
    )
    if model.num_experts:
        sizes = {key: known(getattr(model, key)) for key in ("num_experts", "expert_ffn_size", "hidden_size")}
        problems += check_experts(mesh, **sizes)
    elif mesh.ep > 1:
        message = f"{mesh.ep} has no experts to spread: the model is dense; set model.num_experts, or take a moe preset"
        problems.append(LayoutProblem(CONFIG_KEYS["ep"], mesh.ep, message))
    return problems


def _cut_by_tensor_parallelism(model: ModelSection) -> dict[str, int]:
    keys = ["num_heads", "ffn_size"]
    if model.attention == "gqa":
        keys.append("num_kv_heads")
    if model.kind == "vlm":
        keys += ["hidden_size", "vision_heads", "vision_ffn_size"]
    return {f"model.{key}": known(getattr(model, key)) for key in keys}


def _check_schedule_fits(config: Config, mesh: ParallelMesh) -> list[LayoutProblem]:
    """Whether the step has as many micro-batches as the schedule needs; the batch divides."""
    training, parallelism = config.training, config.parallelism
    share = training.global_batch_size // mesh.data_parallel_size
    micro_batches = share // (training.micro_batch_size or share)
    interleave = parallelism.pipeline_parallel_interleave_num or 1
    problem = check_micro_batches(parallelism.pipeline_parallel_schedule, mesh.pp, interleave, micro_batches)
    return [problem] if problem else []


def _located(loaded: LoadedConfig, problem: LayoutProblem) -> Problem:
    key = f"parallelism.{problem.key}" if problem.key in CONFIG_KEYS.values() else problem.key
    message = problem.message
    if not loaded.is_set(key):
        origin = f"that of {loaded.config.model.preset}" if key.startswith("model.") else "the default"
        message += f" (not set in the file: the value is {origin})"
    return loaded.problem(key, message)


def _written(config: Config, key: str) -> str:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else "this"
