"""Forward and backward of a step's micro-batches: one after the other, or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpcli.config.schema import Config
from hpcli.data.text import Batch, joined
from hpcli.models.vlm import image_tokens
from hpcli.train.torch_loss import GlobalLoss
from hpcli.train.torch_parts import Parts
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.sharding import piece

Progress = Callable[[str], None]


class Accumulation:
    """Micro-batches one after the other on the whole model; gradients are reduced with the last."""

    def __init__(self, model: Any, loss: GlobalLoss, device: torch.device) -> None:
        self.model, self.loss, self.device = model, loss, device

    def run(self, micro_batches: Sequence[Batch], progress: Progress) -> list[torch.Tensor]:
        """The loss of each micro-batch, 0-dim, without history."""
        losses = []
        last = len(micro_batches) - 1
        for index, batch in enumerate(micro_batches):
            progress("forward")
            if last:
                self.model.set_requires_gradient_sync(index == last)
            logits = self.model(*(to_device(array, self.device) for array in batch.model_inputs()))
            loss = self.loss(logits, to_device(batch.labels, self.device))
            progress("backward")
            loss.backward()
            losses.append(loss.detach())
        return losses


class PipelineRun:
    """Micro-batches through the stages of a pipeline, in the order that the schedule gives."""

    def __init__(self, config: Config, mesh: ParallelMesh, parts: Parts, loss: GlobalLoss, device: torch.device) -> None:
        from hyper_parallel.platform.torch.pipeline import PipelineStage, make_schedule

        self.parts, self.loss, self.device = parts, loss, device
        self._progress: Progress = lambda phase: None
        training = config.training
        assert training.micro_batch_size is not None
        count = training.global_batch_size // mesh.data_parallel_size // training.micro_batch_size
        shapes = _Shapes(config, mesh)
        stages = []
        for module, held, index in zip(parts.modules, parts.stages, parts.indices, strict=True):
            module.register_forward_pre_hook(lambda *_: self._progress("forward"))
            inputs = shapes.inputs() if held.first else (shapes.hidden(),)
            output = shapes.logits() if held.last else shapes.hidden()
            stages.append(
                PipelineStage(module, index, parts.total, device, mesh=mesh, input_args=inputs, output_args=output)
            )
        self.schedule = make_schedule(
            config.parallelism.pipeline_parallel_schedule, stages if len(stages) > 1 else stages[0], count, self._loss
        )

    def run(self, micro_batches: Sequence[Batch], progress: Progress) -> list[torch.Tensor]:
        """The loss of each micro-batch, 0-dim, without history; none where the last stage is elsewhere."""
        self._progress = progress
        whole = joined(micro_batches)
        first = any(stage.first for stage in self.parts.stages)
        last = any(stage.last for stage in self.parts.stages)
        inputs = tuple(to_device(array, self.device) for array in whole.model_inputs()) if first else ()
        losses: list[torch.Tensor] = []
        progress("forward")
        self.schedule.step(
            *inputs,
            target=to_device(whole.labels, self.device) if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        progress("backward")
        return [loss.detach() for loss in losses]

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._progress("backward")
        return self.loss(logits, labels)


class _Shapes:
    """What goes in and out of a stage, as tensors on the meta device: without them torch would run a step to find out."""

    def __init__(self, config: Config, mesh: ParallelMesh) -> None:
        self.config, self.mesh = config, mesh
        self.batch = config.training.micro_batch_size or 1
        self.positions = config.training.seq_length + image_tokens(config.model)
        self.compute = getattr(torch, config.training.compute_dtype)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        model = self.config.model
        tokens = torch.empty(self.batch, self.config.training.seq_length, dtype=torch.int64, device="meta")
        if model.kind != "vlm":
            return (tokens,)
        assert model.image_height and model.image_width
        return tokens, torch.empty(self.batch, model.image_height, model.image_width, device="meta")

    def hidden(self) -> torch.Tensor:
        split = self.mesh.tp if self.config.parallelism.sequence_parallel else 1
        assert self.config.model.hidden_size
        return self._floating(self.positions // split, self.config.model.hidden_size)

    def logits(self) -> torch.Tensor:
        tp_rank = torch.distributed.get_rank() % self.mesh.tp
        assert self.config.model.vocab_size
        return self._floating(self.positions, piece(self.config.model.vocab_size, self.mesh.tp, tp_rank).length)

    def _floating(self, *sizes: int) -> torch.Tensor:
        return torch.empty(self.batch, *sizes, dtype=self.compute, device="meta", requires_grad=True)


def to_device(array: Any, device: torch.device) -> torch.Tensor:
    """A NumPy array on ``device``."""
    return torch.from_numpy(array).to(device, non_blocking=True)
