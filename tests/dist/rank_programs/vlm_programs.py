"""Rank programs: a step on images that do not belong to their text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import ParallelMesh


def loss_and_norm(config: dict[str, Any], mesh: dict[str, int], exchange: bool) -> tuple[float, float]:
    """Of the first step; with ``exchange`` every sequence of this rank's share comes with the image of the one before."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    batches = make_batches(settings)
    share = batches.share(1, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
    assert share.images is not None
    if exchange:
        share = share._replace(images=np.roll(share.images, 1, axis=0))
    micro_batches = share.split(settings.training.micro_batch_size or len(share.inputs))
    result = engine.step(micro_batches, batches.valid_tokens(1), settings.optimizer.lr, lambda phase: None)
    return result.loss, result.grad_norm
