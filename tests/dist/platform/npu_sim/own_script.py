"""A user's own training script on the simulated NPU, for torchrun: FSDP2 with offload, torch's optimizer, our clip."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import hyper_parallel
from hyper_parallel.platform import npu_sim

npu_sim.install()
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
fully_shard(model, mesh=init_device_mesh("npu", (dist.get_world_size(),)), offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
losses, norms = [], []
for _ in range(5):
    loss = model(torch.ones(2, 4, device="npu")).sub(3).square().mean()
    loss.backward()
    norms.append(float(hyper_parallel.clip_grad_norm_(model.parameters(), 1.0)))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(f"rank {dist.get_rank()} done {norms}\n", end="", flush=True)  # in one piece
dist.barrier()
dist.destroy_process_group()
