"""Which values go together, beyond what `hyper_parallel.core.mesh` says about layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpcli.config.errors import shorten
from hpcli.config.schema import Config, ModelSection
from hpcli.models.description import known
from hyper_parallel.core.mesh import LayoutProblem, check_divisible, divisors
from hyper_parallel.core.pipeline_layout import V_SCHEDULES, ZERO_BUBBLE_SCHEDULES


def check_rules(config: Config, *, on_cpu: bool) -> Iterator[LayoutProblem]:
    """Every combination that is refused, with the dotted key to change. The configuration is resolved."""
    yield from _check_model(config)
    yield from _check_schedule(config)
    parallelism, fsdp, training = config.parallelism, config.fsdp_config, config.training
    if parallelism.sequence_parallel and parallelism.tensor_parallel == 1:
        yield LayoutProblem(
            "parallelism.sequence_parallel",
            True,
            "true needs tensor_parallel of at least 2: it splits the sequence over the tensor-parallel ranks",
        )
    if fsdp.comm_fusion and config.platform == "torch":
        yield LayoutProblem(
            "fsdp_config.comm_fusion",
            True,
            "true is not a choice on torch, which always fuses; it belongs to mindspore",
        )
    if fsdp.enable_offload and fsdp.pin_memory and on_cpu:
        yield LayoutProblem(
            "fsdp_config.pin_memory",
            True,
            "true needs an accelerator, and this run is on the CPU; leave the key out",
        )
    if training.loss_scale is not None and training.compute_dtype != "float16":
        yield LayoutProblem(
            "training.loss_scale",
            None,
            f"this is for compute_dtype float16, and compute_dtype is {training.compute_dtype}",
        )
    if config.data.path is not None:
        yield from _check_text(config.data.path, training.seq_length)


def _check_model(config: Config) -> Iterator[LayoutProblem]:
    model = config.model
    hidden, heads = known(model.hidden_size), known(model.num_heads)
    if model.attention == "mla":
        if known(model.qk_rope_head_dim) % 2:
            yield _odd("model.qk_rope_head_dim", known(model.qk_rope_head_dim))
    else:
        kv_heads = known(model.num_kv_heads)
        if heads % kv_heads:
            yield _no_divisor("model.num_kv_heads", kv_heads, "num_heads", heads)
        uneven = check_divisible("model.hidden_size", hidden, "num_heads", heads)
        if uneven:
            yield uneven
        elif hidden // heads % 2:
            yield LayoutProblem(
                "model.hidden_size",
                hidden,
                f"{hidden} over num_heads {heads} makes an odd head size, {hidden // heads}, and rotary embeddings turn pairs; "
                f"{' or '.join(str(n) for n in (hidden - heads, hidden + heads) if n)} would work",
            )
    if model.num_experts:
        yield from _check_experts(model)
    if model.kind == "vlm":
        yield from _check_vision(model)


def _check_experts(model: ModelSection) -> Iterator[LayoutProblem]:
    experts, each = known(model.num_experts), known(model.experts_per_token)
    if each > experts:
        yield LayoutProblem(
            "model.experts_per_token", each, f"{each} is more than there are experts (num_experts {experts})"
        )
    dense, layers = known(model.first_dense_layers), known(model.num_layers)
    if dense >= layers:
        yield LayoutProblem(
            "model.first_dense_layers",
            dense,
            f"{dense} leaves no layer for the experts (num_layers {layers}); at most {layers - 1} would work",
        )


def _check_vision(model: ModelSection) -> Iterator[LayoutProblem]:
    for key in ("image_height", "image_width"):
        uneven = check_divisible(f"model.{key}", known(getattr(model, key)), "patch_size", known(model.patch_size))
        if uneven:
            yield uneven
    uneven = check_divisible(
        "model.vision_hidden_size", known(model.vision_hidden_size), "vision_heads", known(model.vision_heads)
    )
    if uneven:
        yield uneven


def _no_divisor(key: str, value: int, of_key: str, of: int) -> LayoutProblem:
    working = ", ".join(map(str, divisors(of)))
    return LayoutProblem(key, value, f"{value} does not divide {of_key} {of}; values that would work: {working}")


def _odd(key: str, value: int) -> LayoutProblem:
    return LayoutProblem(key, value, f"{value} is odd, and rotary embeddings turn pairs; {value - 1 or 2} or {value + 1} would work")


def _check_schedule(config: Config) -> Iterator[LayoutProblem]:
    schedule = config.parallelism.pipeline_parallel_schedule
    stages = config.parallelism.pipeline_parallel_interleave_num
    key = "parallelism.pipeline_parallel_interleave_num"
    if schedule in ("gpipe", "1f1b") and stages != 1:
        yield LayoutProblem(
            key,
            stages,
            f"{stages} needs a schedule that interleaves, such as interleaved_1f1b; {schedule} takes 1",
        )
    if schedule in V_SCHEDULES and stages != 2:
        yield LayoutProblem(key, stages, f"{stages} does not fit {schedule}, which has 2 stages on each rank")
    if schedule in ZERO_BUBBLE_SCHEDULES and config.fsdp_config.reshard_after_forward:
        yield LayoutProblem(
            "fsdp_config.reshard_after_forward",
            True,
            f"true with {schedule} gives wrong gradients: a zero-bubble schedule needs the parameters again "
            "after they were freed; write false, or leave the key out",
        )


def _check_text(path: str, seq_length: int) -> Iterator[LayoutProblem]:
    needed = seq_length + 1

    shown = shorten(path, 200)

    def wrong(message: str) -> LayoutProblem:
        return LayoutProblem("data.path", path, message)

    try:
        if os.path.isdir(path):
            yield wrong(f"{shown} is a directory, not a text file")
            return
        if not os.path.exists(path):
            yield wrong(f"there is no file {shown}")
            return
        if not os.path.isfile(path):
            yield wrong(f"{shown} is not a regular file")
            return
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
    except PermissionError:
        yield wrong(f"{shown} may not be read; check its permissions")
    except OSError as error:
        yield wrong(f"{shown} cannot be read: {error.strerror or error}")
    else:
        if size < needed:
            yield wrong(f"{shown} has {size} bytes; training.seq_length {seq_length} needs at least {needed}")
