"""A training step as ``hpcli train`` makes it, for faults that need the whole of it. Imports torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import hyper_parallel
from hpcli.config.load import LoadedConfig
from hpcli.config.schema import Config
from hpcli.config.validate import resolve_config
from hpcli.data.batches import make_batches
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel.platform.torch.mesh import communication_device

SIZES = {"steps": 2, "seq_length": 16, "seed": 1}


class Trained:
    """A model on all ranks, on the device of the process group, with the gradients of its first step.

    Args:
        sections: of the configuration, over small sizes.
    """

    def __init__(self, **sections: dict[str, Any]) -> None:
        ranks = dist.get_world_size()
        training = {**SIZES, "global_batch_size": 2 * ranks, **sections.get("training", {})}
        config = Config.model_validate({**sections, "training": training})
        resolved = resolve_config(LoadedConfig(config, "repro", {}), ranks=ranks)
        self.config, self.mesh = resolved.config, resolved.mesh
        self.engine = TorchEngine(self.config, self.mesh, communication_device(_world()).type)
        self.batches = make_batches(self.config)
        self.losses: list[float] = []
        self.accumulate(1)

    @property
    def parameters(self) -> list[Any]:
        return list(self.engine.parameters.values())

    def accumulate(self, step: int) -> None:
        """Forward and backward of ``step``."""
        share = self.batches.share(step, self.mesh.data_parallel_rank(dist.get_rank()), self.mesh.data_parallel_size)
        micro_batches = share.split(self.config.training.micro_batch_size or len(share.inputs))
        loss = self.engine.accumulate(micro_batches, self.batches.valid_tokens(step), lambda phase: None)
        self.losses.append(float(loss))

    def exact_norm(self) -> float:
        """The 2-norm of the gradients, each gathered whole on every rank, in float64: no norm of the library's. No pipelines."""
        squares = 0.0
        for parameter in self.parameters:
            whole = parameter.grad.to(self.engine.device).full_tensor()
            squares += float(whole.cpu().double().square().sum())
        return squares**0.5

    def update(self) -> None:
        """Take the step and clear the gradients."""
        self.engine.update(1e-2)
        self.engine.zero_grad()


def norm_of(**sections: dict[str, Any]) -> float:
    """The gradient norm of the first step, with that configuration."""
    trained = Trained(**sections)
    return float(hyper_parallel.grad_norm_report(trained.parameters, mesh=trained.engine.norm_mesh).norm)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
