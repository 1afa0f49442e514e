"""What each of two ranks of the simulated NPU does to measure the clip under offload.

FSDP2 copies every gradient to the host on its own, so they share no buffer. Torch's clip reduces a number on the host over the group
of the gradients' mesh; here that group may do so, since it has gloo for the host beside the device's backend, and so torch's clip runs
at all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from bench.norm_ranks import ROUNDS, Gradients, Matrices, least_time
from hpcli.launch.context import RankContext
from hyper_parallel.platform.npu_sim import install
from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_


def run(context: RankContext, payload: dict[str, Any]) -> None:
    install()
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,npu:hccl", init_method=context.init_method, rank=context.rank, world_size=context.world_size
    )
    torch.manual_seed(0)
    model = Matrices(payload["count"], (64, 64))
    fully_shard(
        model, mesh=init_device_mesh("npu", (context.world_size,)), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    model().backward()
    parameters = list(model.parameters())
    assert {str(p.grad.to_local().device) for p in parameters} == {"cpu"}  # type: ignore[union-attr]
    gradients = Gradients(parameters, norm=float(clip_grad_norm_(parameters, math.inf)))
    calls = {"ours": gradients.clipped_by(clip_grad_norm_), "torch": gradients.clipped_by(torch.nn.utils.clip_grad_norm_)}
    measured = {name: least_time(call, 1) for name, call in calls.items()}  # warm
    for turn in range(ROUNDS):
        context.progress(turn + 1, "gradient norm")
        for name, call in calls.items():
            measured[name] = min(measured[name], least_time(call, payload["repetitions"] // ROUNDS + 1))
    context.emit({"event": "minima", "case": f"{payload['count']:,}, offloaded, simulated NPU", "seconds": measured})
    dist.barrier()
    dist.destroy_process_group()
