"""The public functions: each finds the platform of what it is given and hands over.

The meaning of the arguments is documented where the work is done, in ``hyper_parallel.platform.<platform>``; this module
adds nothing but the choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.precision import MixedPrecisionPolicy, OffloadPolicy

_PLATFORMS = {"torch": "hyper_parallel.platform.torch", "mindspore": "hyper_parallel.platform.mindspore"}
_started = "torch"


def init(
    platform: str = "torch",
    device: str = "cpu",
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout_seconds: float | None = None,
    strict_dtypes: bool = False,
) -> None:
    """Do what must happen before the first operation: threads, device, default process group.

    Under torchrun no further argument is needed. Elsewhere pass ``init_method`` (``file://`` or ``tcp://``), ``rank`` and
    ``world_size``, as for ``torch.distributed.init_process_group``.

    Args:
        platform: "torch" or "mindspore".
        device: "cpu" (gloo), "cuda" (nccl), "npu" (hccl) or "sim-npu" (a simulated NPU in host memory); MindSpore knows "cpu" and
            "npu".
        timeout_seconds: how long a collective may wait for the other ranks; ``None`` is the backend's default.
        strict_dtypes: the simulated NPU refuses dtypes as Ascend does; nothing elsewhere.

    Raises:
        ValueError: an unknown platform or device.
    """
    global _started
    if platform not in _PLATFORMS:
        raise ValueError(f"unknown platform {platform!r}; known: {', '.join(_PLATFORMS)}")
    start = import_module(f"{_PLATFORMS[platform]}.mesh").init_process_group
    start(
        device,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout_seconds=timeout_seconds,
        strict_dtypes=strict_dtypes,
    )
    _started = platform


def parallelize(
    model: Any,
    mesh: ParallelMesh,
    plan: ParallelPlan,
    policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    **options: Any,
) -> Any:
    """Apply every kind of parallelism in ``mesh`` to ``model``, in place, in the right order; return the model."""
    return _implementation(model, "parallelize")(model, mesh, plan, policy, offload_policy, **options)


def fully_shard(module: Any, **options: Any) -> Any:
    """Shard the parameters of a module over data-parallel ranks (FSDP, or HSDP on two axes), in place."""
    return _implementation(module, "fully_shard")(module, **options)


def clip_grad_norm_(parameters: Any, *arguments: Any, **options: Any) -> Any:
    """Clip gradients by their global norm and return it, as ``torch.nn.utils.clip_grad_norm_``, right on every layout."""
    return _on_parameters("clip_grad_norm_", parameters, arguments, options)


def get_total_norm(tensors: Any, *arguments: Any, **options: Any) -> Any:
    """The global norm of gradient tensors, as ``torch.nn.utils.get_total_norm``, right on every layout."""
    return _on_parameters("get_total_norm", tensors, arguments, options)


def clip_grads_with_norm_(parameters: Any, *arguments: Any, **options: Any) -> Any:
    """Clip gradients by a norm that is already known, as ``torch.nn.utils.clip_grads_with_norm_``."""
    return _on_parameters("clip_grads_with_norm_", parameters, arguments, options)


def grad_norm_report(parameters: Any, *arguments: Any, **options: Any) -> Any:
    """:func:`clip_grad_norm_` that also returns what each rank contributed; without ``max_norm`` it only measures."""
    return _on_parameters("grad_norm_report", parameters, arguments, options)


def finish_gradients(parameters: Any, mesh: Any = None) -> None:
    """Complete the gradients after backward: add up those of which other ranks hold a part (see :func:`mark_shared`)."""
    _on_parameters("finish_gradients", parameters, (mesh,), {}, module="finish_gradients")


def mark_shared(parameter: Any, group: Any) -> None:
    """Declare that the ranks of ``group`` hold copies of one parameter, each with a part of its gradient."""
    _implementation(parameter, "finish_gradients", "mark_shared")(parameter, group)


def PipelineStage(module: Any, *arguments: Any, **options: Any) -> Any:
    """One stage of a pipeline, over the ``pp`` axis of a :class:`ParallelMesh`."""
    return _implementation(module, "pipeline", "PipelineStage")(module, *arguments, **options)


def ScheduleGPipe(stages: Any, n_microbatches: int, loss_fn: Any = None) -> Any:
    """All forwards, then all backwards. ``step`` runs it; gradients of micro-batches are added up, never rescaled."""
    return _implementation(stages, "pipeline", "ScheduleGPipe")(stages, n_microbatches, loss_fn)


def Schedule1F1B(stages: Any, n_microbatches: int, loss_fn: Any = None) -> Any:
    """One forward, one backward in turn. ``step`` runs it; gradients of micro-batches are added up, never rescaled."""
    return _implementation(stages, "pipeline", "Schedule1F1B")(stages, n_microbatches, loss_fn)


def ScheduleInterleaved1F1B(stages: Any, n_microbatches: int, loss_fn: Any = None) -> Any:
    """1F1B over several stages on each rank. ``step`` runs it; gradients of micro-batches are added up, never rescaled."""
    return _implementation(stages, "pipeline", "ScheduleInterleaved1F1B")(stages, n_microbatches, loss_fn)


def ScheduleInterleavedZeroBubble(stages: Any, n_microbatches: int, loss_fn: Any = None) -> Any:
    """Interleaved, with weight gradients in the bubble. ``step`` runs it; gradients of micro-batches are added up, never rescaled."""
    return _implementation(stages, "pipeline", "ScheduleInterleavedZeroBubble")(stages, n_microbatches, loss_fn)


def ScheduleZBVZeroBubble(stages: Any, n_microbatches: int, loss_fn: Any = None) -> Any:
    """Zero bubble in a V of two stages on each rank. ``step`` runs it; gradients of micro-batches are added up, never rescaled."""
    return _implementation(stages, "pipeline", "ScheduleZBVZeroBubble")(stages, n_microbatches, loss_fn)


def ScheduleDualPipeV(stages: Any, n_microbatches: int, loss_fn: Any = None) -> Any:
    """DualPipe cut in half to a V. ``step`` runs it; gradients of micro-batches are added up, never rescaled."""
    return _implementation(stages, "pipeline", "ScheduleDualPipeV")(stages, n_microbatches, loss_fn)


def _on_parameters(
    function: str, parameters: Any, arguments: tuple[Any, ...], options: dict[str, Any], module: str = "clip_grad"
) -> Any:
    if _platform(parameters) is None and isinstance(parameters, Iterable):
        parameters = list(parameters)
    return _implementation(parameters, module, function)(parameters, *arguments, **options)


def _implementation(subject: Any, module: str, function: str | None = None) -> Any:
    candidate = subject[0] if isinstance(subject, (list, tuple)) and subject else subject
    package = _PLATFORMS[_platform(candidate) or _started]  # an empty list tells nothing
    return getattr(import_module(f"{package}.{module}"), function or module)


def _platform(subject: Any) -> str | None:
    """The framework that the class of ``subject``, or one of its bases, comes from."""
    names = (base.__module__.removeprefix("hyper_parallel.platform.").partition(".")[0] for base in type(subject).__mro__)
    return next((name for name in names if name in _PLATFORMS), None)
