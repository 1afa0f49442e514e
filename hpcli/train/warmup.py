"""One complete training step without any other rank, so that ranks forked afterwards find everything loaded and compiled.

Nothing may remain that a fork cannot carry over: no thread, no process group, no device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcli.config.schema import Config
from hpcli.data.documents import load_documents
from hpcli.data.text import TextBatches
from hpcli.models.presets import PRESETS
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.platform.torch.mesh import torch_device_type


def warm_up(device: str = "cpu") -> None:
    """Train two steps of a very small decoder under a process group that sends nothing, on "cpu" or on a device that a fork can
    carry over: "sim-npu", once it is in place."""
    torch.set_num_threads(1)
    load_documents(None)  # the module that holds the text is imported once, not in every rank
    sizes = PRESETS["decoder-tiny"] | {"hidden_size": 16, "num_layers": 1, "ffn_size": 16, "freeze": []}
    config = Config.model_validate({"model": {"preset": "decoder-tiny", **sizes}})
    batches = TextBatches([b"hyper parallel"], seq_length=4, batch_size=2, seed=0, shuffle=True)
    dist.init_process_group(f"{torch_device_type(device)}:fake", store=FakeStore(), rank=0, world_size=2)
    try:
        engine = TorchEngine(config, ParallelMesh(dp_shard=2), device)
        for step in (1, 2):
            engine.step([batches.share(step, 0, 2)], batches.valid_tokens(step), 0.0, lambda phase: None)
    finally:
        dist.destroy_process_group()
