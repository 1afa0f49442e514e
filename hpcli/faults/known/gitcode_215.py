"""A gradient that was reduced in float32 is written back into bfloat16 storage."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="gitcode-215",
    title="a float32 reduction is rounded when it is stored",
    kind="reduce",
    source="hyper-parallel gitcode#215",
    condition="bfloat16 parameters, reduce_dtype float32, gradient 1 on rank 0 and 2^-10 on rank 1",
    shown_by="stock",
    wrong=1.0,
    right=1.0009765625,
    how_we_know="1 + 2^-10 needs 11 significant bits: exact in float32, 1 in bfloat16",
    why="The reduction runs in float32 as asked, and its result is then cast to the dtype of the shard it "
    "belongs to. With bfloat16 storage all that was won is lost again. Here shards are the float32 master "
    "weights, behind an all-gather in bfloat16.",
)


def right() -> float:
    import torch

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = torch.nn.Linear(1, 2, bias=False)
    policy = hyper_parallel.MixedPrecisionPolicy("bfloat16", "bfloat16", "float32")
    return _gradient(hyper_parallel.fully_shard(model, mesh=ranks_mesh(), mp_policy=policy))


def wrong() -> float:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hpcli.faults.parameters import ranks_mesh

    model: Any = torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    fully_shard(model, mesh=ranks_mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    return _gradient(model)


def _gradient(model: Any) -> float:
    import torch
    import torch.distributed as dist

    part = 1.0 if dist.get_rank() == 0 else 2.0**-10
    model(torch.full((1, 1), part, dtype=torch.bfloat16)).sum().backward()
    return model.weight.grad.to_local().item()
