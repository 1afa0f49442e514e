"""Parallel training for PyTorch and MindSpore, with a gradient norm that is right on every layout.

Importing this package imports no framework: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.api import (
        PipelineStage,
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        clip_grad_norm_,
        clip_grads_with_norm_,
        finish_gradients,
        fully_shard,
        get_total_norm,
        grad_norm_report,
        init,
        mark_shared,
        parallelize,
    )
    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.plan import ParallelPlan
    from hyper_parallel.core.precision import MixedPrecisionPolicy, OffloadPolicy

_HOMES = {
    "init": "hyper_parallel.api",
    "PipelineStage": "hyper_parallel.api",
    "ScheduleGPipe": "hyper_parallel.api",
    "Schedule1F1B": "hyper_parallel.api",
    "ScheduleInterleaved1F1B": "hyper_parallel.api",
    "ScheduleInterleavedZeroBubble": "hyper_parallel.api",
    "ScheduleZBVZeroBubble": "hyper_parallel.api",
    "ScheduleDualPipeV": "hyper_parallel.api",
    "parallelize": "hyper_parallel.api",
    "fully_shard": "hyper_parallel.api",
    "clip_grad_norm_": "hyper_parallel.api",
    "get_total_norm": "hyper_parallel.api",
    "clip_grads_with_norm_": "hyper_parallel.api",
    "grad_norm_report": "hyper_parallel.api",
    "finish_gradients": "hyper_parallel.api",
    "mark_shared": "hyper_parallel.api",
    "ParallelMesh": "hyper_parallel.core.mesh",
    "ParallelPlan": "hyper_parallel.core.plan",
    "MixedPrecisionPolicy": "hyper_parallel.core.precision",
    "OffloadPolicy": "hyper_parallel.core.precision",
}

__all__ = [
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelMesh",
    "ParallelPlan",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "finish_gradients",
    "fully_shard",
    "get_total_norm",
    "grad_norm_report",
    "init",
    "mark_shared",
    "parallelize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
