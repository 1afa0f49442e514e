"""Pipeline parallelism on torch: ``torch.distributed.pipelining``, set so that gradients are sums and schedules are safe.

A schedule adds up the gradients of its micro-batches and never rescales them: divide the loss by the tokens of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_layout import ZERO_BUBBLE_SCHEDULES
from hyper_parallel.platform.torch.mesh import device_mesh

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PipelineStage(pipelining.PipelineStage):
    """One stage of a pipeline: torch's, over the ``pp`` axis of a :class:`ParallelMesh`.

    Args:
        module: the stage's part of the model, already sharded.
        stage_index: which stage it is, of ``num_stages``.
        device: where it computes.
        mesh: with an axis ``pp``; or pass ``group``.
        input_args, output_args: tensors (on the meta device) of the shapes and dtypes of one micro-batch's input and output. Without
            them torch finds out by a forward and backward of its own in the first step.

    Raises:
        ValueError: ``mesh`` has no axis ``pp``.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        mesh: ParallelMesh | DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        if isinstance(mesh, ParallelMesh):
            mesh = device_mesh(mesh)
        if mesh is not None:
            if "pp" not in (mesh.mesh_dim_names or ()):
                axes = ", ".join(mesh.mesh_dim_names or ()) or "no named axis"
                raise ValueError(f"a pipeline needs a mesh with an axis pp of at least 2 ranks, and this one has {axes}")
            group = mesh["pp"].get_group()
        super().__init__(module, stage_index, num_stages, device, input_args, output_args, group=group)

    def backward_maybe_with_nosync(self, *arguments: Any, **options: Any) -> Any:
        """One backward of a micro-batch, or the part of it for inputs or weights; called by the schedule."""
        result = super().backward_maybe_with_nosync(*arguments, **options)
        if isinstance(self.submod, FSDPModule):
            _accumulate_in_reduce_dtype(self.submod)
        return result


def make_schedule(
    name: str, stages: PipelineStage | Sequence[PipelineStage], micro_batches: int, loss: Loss | None = None
) -> Any:
    """The schedule ``name`` (a key of ``SCHEDULES``) over this rank's stages; its ``step`` runs forward and backward.

    Args:
        micro_batches: in a step; the step's batch is split into as many.
        loss: of the last stage's output and target; the gradients of all micro-batches are added up.

    Raises:
        ValueError: an unknown name, or a zero-bubble schedule over modules that free their parameters after forward: it
            computes weight gradients late, and torch 2.13 then gives wrong gradients without an error.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {name!r}; known: {', '.join(SCHEDULES)}")
    listed = list(stages) if isinstance(stages, Sequence) else [stages]
    if name in ZERO_BUBBLE_SCHEDULES:
        for stage in listed:
            _require_unsharded(stage.submod, name)
    kind = SCHEDULES[name]
    if issubclass(kind, PipelineScheduleSingle):
        if len(listed) != 1:
            raise ValueError(f"{name} takes one stage on each rank, not {len(listed)}")
        return kind(listed[0], micro_batches, loss_fn=loss, scale_grads=False)
    return kind(listed, micro_batches, loss_fn=loss, scale_grads=False)


def _accumulate_in_reduce_dtype(module: FSDPModule) -> None:
    """FSDP2 moves gradients to ``reduce_dtype`` in a hook of backward on inputs. Where a schedule computes weight gradients of
    several micro-batches in a row (DualPipeV), torch 2.13 adds them up in the compute dtype before: 256 + 1 is 256 in bfloat16."""
    for state in module._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _require_unsharded(module: nn.Module, schedule: str) -> None:
    for name, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        is_root = part is module
        for group in state._fsdp_param_groups:
            if group.post_forward_mesh_info is not None and not (is_root and state._auto_reshard_after_forward):
                raise ValueError(
                    f"{schedule} needs fully_shard(..., reshard_after_forward=False), and {name or 'the stage'} frees its "
                    "parameters after forward: with torch 2.13 its gradients would be wrong without an error"
                )


def ScheduleGPipe(stage: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Any:
    """All forwards, then all backwards (Huang et al., "GPipe", 2019)."""
    return make_schedule("gpipe", stage, n_microbatches, loss_fn)


def Schedule1F1B(stage: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Any:
    """One forward, one backward in turn (Narayanan et al., "PipeDream-Flush", 2021)."""
    return make_schedule("1f1b", stage, n_microbatches, loss_fn)


def ScheduleInterleaved1F1B(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Any:
    """1F1B over several stages on each rank (Narayanan et al., "Efficient large-scale language model training", 2021)."""
    return make_schedule("interleaved_1f1b", stages, n_microbatches, loss_fn)


def ScheduleInterleavedZeroBubble(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Any:
    """Interleaved, with weight gradients filling the bubble (Qi et al., "Zero bubble pipeline parallelism", 2024)."""
    return make_schedule("interleaved_zero_bubble", stages, n_microbatches, loss_fn)


def ScheduleZBVZeroBubble(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Any:
    """Zero bubble in a V of two stages on each rank (same paper, section 6)."""
    return make_schedule("zbv", stages, n_microbatches, loss_fn)


def ScheduleDualPipeV(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Any:
    """DualPipe cut in half to a V (DeepSeek-AI, "DeepSeek-V3", 2024)."""
    return make_schedule("dualpipev", stages, n_microbatches, loss_fn)
