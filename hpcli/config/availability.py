"""What parses and is checked, but cannot run yet. A feature that lands deletes its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpcli.config.schema import Config


class Unavailable(NamedTuple):
    """`asked` says whether a configuration wants it; `has` completes the message."""

    key: str
    asked: Callable[[Config], bool]
    has: str


_AXES = "which trains with data_parallel_shard and data_parallel_replicate"
_DTYPES = "which computes in float32 and bfloat16"

NOT_YET: tuple[Unavailable, ...] = (
    Unavailable("platform", lambda c: c.platform == "mindspore", "which runs on torch"),
    Unavailable("device", lambda c: c.device == "sim-npu", "which runs on cpu, cuda and npu"),
    Unavailable(
        "model.preset", lambda c: c.model.kind != "decoder", "which has decoder-tiny and decoder-small"
    ),
    Unavailable("training.compute_dtype", lambda c: c.training.compute_dtype == "float16", _DTYPES),
    Unavailable("training.loss_scale", lambda c: c.training.loss_scale is not None, _DTYPES),
    Unavailable("parallelism.tensor_parallel", lambda c: c.parallelism.tensor_parallel > 1, _AXES),
    Unavailable("parallelism.sequence_parallel", lambda c: c.parallelism.sequence_parallel, _AXES),
    Unavailable("parallelism.pipeline_parallel", lambda c: c.parallelism.pipeline_parallel > 1, _AXES),
    Unavailable("parallelism.expert_parallel", lambda c: c.parallelism.expert_parallel > 1, _AXES),
    Unavailable("checkpoint.every", lambda c: c.checkpoint.every > 0, "which saves no checkpoints"),
)
