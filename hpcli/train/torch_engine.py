"""One training step on torch: forward, backward, clip, optimizer, on parameters that FSDP2 shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hyper_parallel
from hpcli.config.schema import Config, TrainingSection
from hpcli.data.text import Batch
from hpcli.models.description import describe_model
from hpcli.train.engine import TOLD, StepResult
from hpcli.train.precision import precision_policy
from hpcli.train.torch_loss import GlobalLoss
from hpcli.train.torch_optimizer import Optimizer
from hpcli.train.torch_parts import build_parts
from hpcli.train.torch_schedule import Accumulation, PipelineRun
from hyper_parallel.core.loss_scale import LossScaler
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.platform.torch.clip_grad import GradNormReport
from hyper_parallel.platform.torch.mesh import torch_device_type


class ReplicasDifferError(RuntimeError):
    """Ranks that hold replicas of the same gradients hold different ones. Raised on every rank alike."""


class TorchEngine:
    """The model of ``config`` on ``mesh``; needs a default process group on ``device_type`` with as many ranks.

    A step is :meth:`accumulate`, :meth:`clip`, :meth:`update` and :meth:`zero_grad`; :meth:`step` does them in order.

    Attributes:
        parts: the modules of this rank: the model, or with pipeline parallelism this rank's stages in ascending order.
        parameters: name in the whole model -> parameter, of all trainable parameters of this rank.
        norm_mesh: what the norm's scope is, where the parameters do not show it.
    """

    def __init__(self, config: Config, mesh: ParallelMesh, device_type: str) -> None:
        self.training = config.training
        self.mesh = mesh
        self.device = _this_device(torch_device_type(device_type))
        if config.training.deterministic:
            torch.use_deterministic_algorithms(True)
        policy = precision_policy(config)
        self._parts = build_parts(config, mesh, self.device)
        self.parts = self._parts.modules
        self.parameters: dict[str, Any] = {
            name: parameter for name, parameter in self._parts.parameters().items() if parameter.requires_grad
        }
        self.parameter_count = sum(math.prod(spec.shape) for spec in describe_model(config.model).values())
        self._loss = GlobalLoss(mesh, config.model.vocab_size or 0)
        self._run: Accumulation | PipelineRun
        if mesh.pp > 1:
            self._run = PipelineRun(config, mesh, self._parts, self._loss, self.device)
        else:
            self._run = Accumulation(self.parts[0], self._loss, self.device)
        # The optimizer works on plain views of the shards: elementwise arithmetic needs nothing of what a DTensor knows, and
        # for DTensors torch 2.13 first derives a layout of the whole fused operation, a tenth of a second in every rank.
        with torch.no_grad():  # elsewhere to_local gives a view that autograd tracks
            self.shards = [parameter.to_local().detach().requires_grad_() for parameter in self.parameters.values()]
        self.optimizer = Optimizer(dict(zip(self.parameters, self.shards, strict=True)), config.optimizer, policy)
        # a head that is tied across stages is the embedding, under whose name it is saved
        self._tied_names = {"head.weight": "embedding.weight"} if config.model.tie_embeddings else {}
        # the parameters of a pipeline stage do not show that there are other stages
        self.norm_mesh = mesh if mesh.pp > 1 else None
        self.report: GradNormReport | None = None
        self.scaler = _scaler(config.training)
        self._overflows = False

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by."""
        return self.scaler.scale if self.scaler else 1.0

    def step(
        self,
        micro_batches: Sequence[Batch],
        valid_tokens: int,
        lr: float,
        progress: Callable[[str], None],
        stop: bool = False,
    ) -> StepResult:
        loss_here = self.accumulate(micro_batches, valid_tokens, progress)
        progress("gradient norm")
        mine = torch.stack([loss_here, torch.full_like(loss_here, float(stop))])
        told = torch.empty(len(TOLD) * dist.get_world_size(), dtype=torch.float64, device=self.device)
        gathering = dist.all_gather_single(told, mine, async_op=True)
        report = self.clip()
        norm = float(report.norm)
        progress("optimizer")
        scale = self.scaler.scale if self.scaler else None
        skip_reason = None
        if self.scaler.update(norm) if self.scaler else math.isfinite(norm):
            self.update(lr)
        elif self.scaler:
            skip_reason = f"the gradient norm is {norm} at loss scale {scale:g}; it goes on at {self.scaler.scale:g}"
        else:
            skip_reason = f"the gradient norm is {norm}; the weights were left as they are"
        self.zero_grad()
        gathering.wait()
        losses, stops = told.cpu().view(-1, len(TOLD)).unbind(1)
        loss, stopped = math.fsum(losses.tolist()), bool(stops.any())
        return StepResult(loss, norm, report.clip_coefficient, skip_reason, stopped, scale)

    def accumulate(
        self, micro_batches: Sequence[Batch], valid_tokens: int, progress: Callable[[str], None]
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches, until every gradient is complete on every rank.

        Returns:
            This rank's contribution to the loss, 0-dim float64 on the device: the contributions of all ranks add up to the loss
            of the global batch.
        """
        self._loss.valid_tokens, self._loss.scale = valid_tokens, self.loss_scale
        with self._loss.context():
            losses = self._run.run(micro_batches, progress)
        if self._parts.local_tie:
            self._parts.local_tie.add_up()
        if self._overflows:
            next(p.grad for p in self.parameters.values() if p.grad is not None).to_local().fill_(math.inf)
            self._overflows = False
        hyper_parallel.finish_gradients(self.parts, self.mesh)
        if not losses or self.mesh.coordinates(dist.get_rank())["tp"]:  # tensor-parallel ranks hold one and the same loss
            losses = [torch.zeros((), device=self.device)]
        # added up on the host: not every device has float64 arithmetic
        return (torch.stack(losses).cpu().double().sum() / self.loss_scale).to(self.device)

    def clip(self) -> GradNormReport:
        """Clip the gradients by their global norm and undo the loss scale; tell what every rank had to do with it.

        Raises:
            ReplicasDifferError: replicas of the same gradients differ.
            NonFiniteNormError: with ``training.error_if_nonfinite``, and without loss scaling, to which overflows belong.
        """
        settings = self.training
        report: GradNormReport = hyper_parallel.grad_norm_report(
            list(self.parameters.values()),
            settings.max_norm,
            settings.norm_type,
            mesh=self.norm_mesh,
            loss_scale=self.loss_scale,
        )
        self.report = report
        if report.replicas_differ:
            raise ReplicasDifferError(_replicas_text(report))
        if settings.error_if_nonfinite and self.scaler is None and not math.isfinite(float(report.norm)):
            # given the modules, the error can tell names
            hyper_parallel.grad_norm_report(
                self.parts, math.inf, settings.norm_type, True, mesh=self.norm_mesh
            )
        return report

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """One optimizer step with the gradients as they are."""
        for parameter, shard in zip(self.parameters.values(), self.shards, strict=True):
            now = parameter.to_local()
            if shard.data_ptr() != now.data_ptr():  # FSDP2 may move shards (padding, pinning) until the first forward
                shard.data = now
            shard.grad = None if parameter.grad is None else parameter.grad.to_local()
        self.optimizer.step(lr)
        if self._parts.local_tie:
            self._parts.local_tie.follow()

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        self.optimizer.zero_grad()
        for parameter in self.parameters.values():
            parameter.grad = None

    def save(self, folder: Path) -> dict[str, Any]:
        from hpcli.checkpoint.torch_state import save_tensors

        save_tensors(self._state(), folder)
        return {"updates": self.optimizer.updates, "loss_scale": None if self.scaler is None else asdict(self.scaler)}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        from hpcli.checkpoint.torch_state import load_tensors

        load_tensors(self._state(), folder)
        self.optimizer.updates = int(state["updates"])
        if self.scaler is not None and state.get("loss_scale"):
            self.scaler = LossScaler(**state["loss_scale"])
        if self._parts.local_tie:
            with torch.no_grad():
                self._parts.local_tie.follow()

    def _state(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds, as it lies in memory."""
        from hpcli.checkpoint.torch_state import training_tensors

        return training_tensors(self._parts.parameters(), self.optimizer.state(), tied=self._tied_names)

    def plant_overflow(self) -> None:
        self._overflows = True

    def rank_row(self) -> dict[str, Any]:
        assert self.report is not None
        part = next(part for part in self.report.parts if part.rank == dist.get_rank())
        return {
            "device": str(self.device),
            "with_gradient": part.with_gradient,
            "without_gradient": part.without_gradient,
            "local_norm": part.held,
            "contributed": part.contributed,
            "global_norm": float(self.report.norm),
        }

    def gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone

    def close(self) -> None:
        dist.barrier()  # a rank that leaves early would close connections that others still need
        dist.destroy_process_group()


def _scaler(training: TrainingSection) -> LossScaler | None:
    """Dynamic loss scaling, which float16 needs."""
    if training.compute_dtype != "float16":
        return None
    chosen = training.loss_scale
    return LossScaler() if chosen is None else LossScaler(chosen.initial, chosen.growth_interval)


def _replicas_text(report: GradNormReport) -> str:
    held = {part.rank: part.held for part in report.parts}
    groups = (", ".join(f"rank {rank} {held[rank]:.9g}" for rank in ranks) for ranks in report.replicas_differ)
    return (
        "replicas of the same gradients differ, so the replicas of the model drift apart; norms of what each holds: "
        + "; ".join(groups)
    )


def _this_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
