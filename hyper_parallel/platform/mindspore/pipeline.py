"""Pipeline parallelism on MindSpore: stages for the schedules of ``core.pipeline_parallel``, and messages between them.

The gradients of micro-batches are accumulated, whole, in the dtype of the reduction, and reduced once, where the schedule says so.
They are added up and never rescaled: divide the loss by the tokens of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_parallel import Kind, PipelineScheduler, Step, make_schedule
from hyper_parallel.core.pipeline_parallel.scheduler import Pending
from hyper_parallel.core.precision import ITEM_SIZES, dtype_name
from hyper_parallel.platform.mindspore import autograd, collectives
from hyper_parallel.platform.mindspore.collectives import Group
from hyper_parallel.platform.mindspore.fully_shard import drain_reductions, set_requires_gradient_sync
from hyper_parallel.platform.mindspore.layout import place
from hyper_parallel.platform.mindspore.mesh import group
from hyper_parallel.platform.mindspore.tensors import added, copied

Loss = Callable[[ms.Tensor, Any], ms.Tensor]

_DTYPES = tuple(ITEM_SIZES)
_HEADER = 8  # dtype, number of dimensions, dimensions


class PipelineStage:
    """One stage of a pipeline.

    Args:
        module: the stage's part of the model, already sharded.
        stage_index: which stage it is, of ``num_stages``.
        mesh: with the axis ``pp``.
    """

    def __init__(self, module: ms.nn.Cell, stage_index: int, num_stages: int, *, mesh: ParallelMesh) -> None:
        self.module = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group = group(mesh, "pp")
        self.loss: Loss | None = None
        self.targets: Sequence[Any] = ()
        self._saved: dict[int, tuple[Any, ms.Tensor]] = {}

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.stage_index == self.num_stages - 1

    def execute_forward(self, micro_batch: int, value: Any) -> ms.Tensor:
        """Compute a micro-batch; the loss in the last stage, if there is a loss function."""
        with autograd.recording():
            if not self.is_first:
                autograd.requiring_grad(value)
            output = self.module(*value) if isinstance(value, tuple) else self.module(value)
            if self.is_last and self.loss is not None:
                output = self.loss(output, self.targets[micro_batch])
        self._saved[micro_batch] = (value, output)
        return output

    def execute_backward(self, micro_batch: int, gradient: ms.Tensor | None) -> ms.Tensor | None:
        """Accumulate the gradients of the parameters; return that of the stage's input."""
        value, output = self._saved.pop(micro_batch)
        inputs = [] if self.is_first else [value]
        params = [parameter for parameter in self.module.get_parameters() if parameter.requires_grad]
        found = autograd.backward(output, gradient, [*inputs, *params])
        for parameter, part in zip(params, found[len(inputs) :], strict=True):
            if place(parameter) is None and part is not None:  # not in a sharded unit, which accumulates for itself
                before = getattr(parameter, "grad", None)
                parameter.grad = copied(part.contiguous()) if before is None else added(before, part.contiguous())
        return found[0] if inputs else None

    def execute_reduce_grad(self) -> None:
        """Reduce what the micro-batches accumulated, one unit's communication overlapping the next one's."""
        drain_reductions([self.module], all_units=True)

    def forget(self) -> None:
        """Drop what an unfinished step left behind."""
        self._saved.clear()
        self.targets = ()


class Messages:
    """Tensors between the ranks of a pipeline. The first activation that a stage gets is preceded by its shape and dtype; the others
    are like it, and a gradient is like the activation that it belongs to."""

    def __init__(self, ranks: Group) -> None:
        self.ranks = ranks
        self._like: dict[tuple[Kind, int], tuple[tuple[int, ...], str]] = {}

    def send(self, value: ms.Tensor, to_rank: int, step: Step) -> Pending:
        """Start sending an activation or a gradient.

        Raises:
            ValueError: micro-batches of different shapes.
        """
        tensor = value.contiguous()
        started = []
        if step.kind is Kind.SEND_ACTIVATION:
            like = (tuple(tensor.shape), dtype_name(tensor.dtype))
            known = self._like.setdefault((Kind.RECV_GRADIENT, step.stage), like)
            if known is like:
                header = [_DTYPES.index(like[1]), len(like[0]), *like[0]]
                numbers = ms.Tensor(np.array(header + [0] * (_HEADER - len(header)), np.int32))
                started.append(collectives.send(numbers, self.ranks, to_rank))
            elif known != like:
                raise ValueError(f"stage {step.stage} gives {like[1]} {like[0]} after {known[1]} {known[0]}; micro-batches must be alike")
        started.append(collectives.send(tensor, self.ranks, to_rank))
        return _All(started)

    def receive(self, from_rank: int, step: Step) -> Pending:
        """Start receiving an activation or a gradient."""
        key = (step.kind, step.stage)
        if key not in self._like:
            header = collectives.receive_integers(_HEADER, self.ranks, from_rank)
            self._like[key] = (tuple(header[2 : 2 + header[1]]), _DTYPES[header[0]])
        shape, dtype = self._like[key]
        return collectives.receive(shape, dtype, self.ranks, from_rank)


class _All:
    def __init__(self, started: Sequence[collectives.Pending]) -> None:
        self.started = started

    def wait(self) -> None:
        """Until all are sent."""
        for pending in self.started:
            pending.wait()


class Schedule:
    """A schedule over this rank's stages; :meth:`step` takes a training step.

    Args:
        name: "gpipe", "1f1b" or "interleaved_1f1b".
        stages: one, or all that this rank holds.
        micro_batches: in a step; the step's batch is split into as many.
        loss: of the last stage's output and target; the gradients of all micro-batches are added up.

    Raises:
        ValueError: an unknown name, or numbers that the schedule cannot lay out.
    """

    def __init__(
        self, name: str, stages: PipelineStage | Sequence[PipelineStage], micro_batches: int, loss: Loss | None = None
    ) -> None:
        self.stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        if not self.stages:
            raise ValueError("a pipeline schedule was given no stage")
        ranks = self.stages[0].group
        interleave = self.stages[0].num_stages // ranks.size
        self.schedule = make_schedule(name, ranks.size, micro_batches, interleave)
        by_index = {stage.stage_index: stage for stage in self.stages}
        self._scheduler = PipelineScheduler(self.schedule, ranks.position, by_index, Messages(ranks))
        for stage in self.stages:
            stage.loss = loss
            set_requires_gradient_sync(stage.module, False)

    def step(self, *inputs: Any, target: Any = None, losses: list[ms.Tensor] | None = None) -> None:
        """Forward and backward of a batch, and the reduction of its gradients.

        Args:
            inputs: on the rank of the first stage: tensors, split along dimension 0; elsewhere nothing.
            target: on the rank of the last stage, split like them.
            losses: on the rank of the last stage, gets the micro-batches' losses.
        """
        count = self.schedule.micro_batches
        batches: list[Any] = [None] * count
        if inputs:
            batches = list(zip(*(_split(tensor, count) for tensor in inputs), strict=True))
        for stage in self.stages:
            stage.targets = [None] * count if target is None else _split(target, count)
        try:
            found = self._scheduler.run(batches)
        finally:
            for stage in self.stages:
                stage.forget()
        if losses is not None:
            losses.extend(found)


def ScheduleGPipe(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Schedule:
    """All forwards, then all backwards (Huang et al., "GPipe", 2019)."""
    return Schedule("gpipe", stages, n_microbatches, loss_fn)


def Schedule1F1B(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Schedule:
    """One forward, one backward in turn (Narayanan et al., "PipeDream-Flush", 2021)."""
    return Schedule("1f1b", stages, n_microbatches, loss_fn)


def ScheduleInterleaved1F1B(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Schedule:
    """1F1B over several stages on each rank (Narayanan et al., 2021, section 2.2)."""
    return Schedule("interleaved_1f1b", stages, n_microbatches, loss_fn)


def ScheduleInterleavedZeroBubble(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Schedule:
    """
    Raises:
        ValueError: always; it is torch's alone.
    """
    return Schedule("interleaved_zero_bubble", stages, n_microbatches, loss_fn)


def ScheduleZBVZeroBubble(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Schedule:
    """
    Raises:
        ValueError: always; it is torch's alone.
    """
    return Schedule("zbv", stages, n_microbatches, loss_fn)


def ScheduleDualPipeV(stages: Any, n_microbatches: int, loss_fn: Loss | None = None) -> Schedule:
    """
    Raises:
        ValueError: always; it is torch's alone.
    """
    return Schedule("dualpipev", stages, n_microbatches, loss_fn)


def _split(tensor: ms.Tensor, count: int) -> list[ms.Tensor]:
    size = tensor.shape[0]
    if size % count:
        raise ValueError(f"a batch of {size} cannot be split into {count} micro-batches")
    each = size // count
    return [tensor[start : start + each] for start in range(0, size, each)]
