"""Stock torch's clip of offloaded gradients over an accelerator's process group."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, Raises

ENTRY = Entry(
    id="pytorch-148532",
    title="stock torch cannot clip offloaded gradients",
    kind="offload",
    source="pytorch#148532",
    condition="one weight with gradient 3 on rank 0 and 4 on rank 1, sharded by FSDP2 with "
    "CPUOffloadPolicy, the group's backend being that of the accelerator alone",
    shown_by="stock",
    wrong=Raises("No backend type associated with device type cpu", through=("torch/nn/utils/clip_grad.py:clip_grad_norm_",)),
    right=ByRank(([5.0, 0.6, "cpu"], [5.0, 0.8, "cpu"])),
    how_we_know="sqrt(9 + 16) = 5; 3/5 and 4/5; the gradients stay where offload put them",
    why="The gradients are CPU tensors, so their norm is one, and torch reduces it where it is. A group "
    "that was made with nccl or hccl alone has no way to do so. A second backend for the CPU helps, and so "
    "does a norm that travels by the group's own device.",
    device="accelerator",
)


def right() -> list[Any]:
    from hyper_parallel import clip_grad_norm_

    model = _offloaded()
    norm = clip_grad_norm_(model, 1.0).item()
    gradient = model.weight.grad.to_local()
    return [norm, gradient.item(), gradient.device.type]


def wrong() -> float:
    import torch

    norm: Any = torch.nn.utils.clip_grad_norm_(_offloaded().parameters(), 1.0)
    return norm.full_tensor().item()


def _offloaded() -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from hyper_parallel.platform.torch.mesh import communication_device

    assert dist.group.WORLD is not None
    device = communication_device(dist.group.WORLD)
    model: Any = torch.nn.Linear(1, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh(device.type, (2,)), offload_policy=CPUOffloadPolicy())
    factors = torch.tensor([3.0, 4.0], device=device)
    (model(torch.ones(1, device=device)) * factors).sum().backward()
    return model
