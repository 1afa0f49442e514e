"""One training step on torch: forward, backward, clip, optimizer, on parameters that FSDP2 shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import hyper_parallel
from hpcli.config.schema import Config
from hpcli.data.text import IGNORED, Batch
from hpcli.models.torch.build import build_model
from hpcli.train.engine import StepResult
from hpcli.train.precision import precision_policy
from hpcli.train.torch_optimizer import Optimizer
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.precision import OffloadPolicy
from hyper_parallel.platform.torch.clip_grad import GradNormReport


class ReplicasDifferError(RuntimeError):
    """Ranks that hold replicas of the same gradients hold different ones. Raised on every rank alike."""


class TorchEngine:
    """The model of ``config`` on ``mesh``; needs a default process group on ``device_type`` with as many ranks."""

    def __init__(self, config: Config, mesh: ParallelMesh, device_type: str) -> None:
        self.training = config.training
        self.device = _this_device(device_type)
        if config.training.deterministic:
            torch.use_deterministic_algorithms(True)
        policy = precision_policy(config)
        model = build_model(config.model, config.training.seed)
        self.parameter_count = sum(parameter.numel() for parameter in model.parameters())
        offload = OffloadPolicy(config.fsdp_config.pin_memory) if config.fsdp_config.enable_offload else None
        if offload is None:
            model = model.to(self.device)
        self.model: Any = hyper_parallel.parallelize(
            model, mesh, _plan(config), policy, offload, device_type=device_type
        )
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters: list[Any] = list(trainable.values())
        # The optimizer works on plain views of the shards: elementwise arithmetic needs nothing of what a DTensor knows, and
        # for DTensors torch 2.13 first derives a layout of the whole fused operation, a tenth of a second in every rank.
        with torch.no_grad():  # elsewhere to_local gives a view that autograd tracks
            self.shards = [parameter.to_local().detach().requires_grad_() for parameter in self.parameters]
        self.optimizer = Optimizer(dict(zip(trainable, self.shards, strict=True)), config.optimizer, policy)
        self.report: GradNormReport | None = None

    def step(
        self, micro_batches: Sequence[Batch], valid_tokens: int, lr: float, progress: Callable[[str], None]
    ) -> StepResult:
        loss_here = torch.zeros((), dtype=torch.float64, device=self.device)
        last = len(micro_batches) - 1
        for index, batch in enumerate(micro_batches):
            progress("forward")
            if last:
                self.model.set_requires_gradient_sync(index == last)
            loss = token_loss(self.model(self._tensor(batch.inputs)), self._tensor(batch.labels)) / valid_tokens
            progress("backward")
            loss.backward()
            loss_here += loss.detach()
        progress("gradient norm")
        losses = torch.empty(dist.get_world_size(), dtype=torch.float64, device=self.device)
        gathering = dist.all_gather_single(losses, loss_here.view(1), async_op=True)
        self.report = hyper_parallel.grad_norm_report(
            self.parameters,
            self.training.max_norm,
            self.training.norm_type,
        )
        assert self.report is not None
        if self.report.replicas_differ:
            raise ReplicasDifferError(_replicas_text(self.report))
        norm = float(self.report.norm)
        if self.training.error_if_nonfinite and not math.isfinite(norm):  # given the module, the error can tell names
            hyper_parallel.grad_norm_report(self.model, math.inf, self.training.norm_type, True)
        progress("optimizer")
        skip_reason = None
        if math.isfinite(norm):
            self._update(lr)
        else:
            skip_reason = f"the gradient norm is {norm}; the weights were left as they are"
        self.optimizer.zero_grad()
        for parameter in self.parameters:
            parameter.grad = None
        gathering.wait()
        return StepResult(math.fsum(losses.tolist()), norm, self.report.clip_coefficient, skip_reason)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            now = parameter.to_local()
            if shard.data_ptr() != now.data_ptr():  # FSDP2 may move shards (padding, pinning) until the first forward
                shard.data = now
            shard.grad = None if parameter.grad is None else parameter.grad.to_local()
        self.optimizer.step(lr)

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

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def token_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The sum of cross entropies over the labels that are not ignored, in float32."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _replicas_text(report: GradNormReport) -> str:
    held = {part.rank: part.held for part in report.parts}
    groups = (", ".join(f"rank {rank} {held[rank]:.9g}" for rank in ranks) for ranks in report.replicas_differ)
    return (
        "replicas of the same gradients differ, so the replicas of the model drift apart; norms of what each holds: "
        + "; ".join(groups)
    )


def _plan(config: Config) -> ParallelPlan:
    return ParallelPlan(
        layers=tuple(f"layers.{index}" for index in range(config.model.num_layers or 0)),
        unit=config.fsdp_config.unit,
        activation_checkpointing=config.training.activation_checkpointing == "full",
        reshard_after_forward=config.fsdp_config.reshard_after_forward,
    )


def _this_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


