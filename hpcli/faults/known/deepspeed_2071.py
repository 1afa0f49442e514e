"""Gradients are reduced in float16 while training in bfloat16."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="deepspeed-2071",
    title="bfloat16 gradients reduced in float16",
    kind="reduce",
    source="DeepSpeed#2071",
    condition="bfloat16 computation on 2 ranks, a gradient of 35000 on each",
    shown_by="formula",
    wrong=math.inf,
    right=70144.0,
    how_we_know="35000 is 35072 in bfloat16 (steps of 256), twice it is 70144; float16 ends at 65504",
    why="bfloat16 has the range of float32, float16 ends at 65504. A communication dtype left over from "
    "float16 training makes sums infinite that bfloat16 holds. None means the dtype of the gradient, and it "
    "is resolved in one place.",
)


def right() -> float:
    import torch

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = torch.nn.Linear(1, 2, bias=False)
    policy = hyper_parallel.MixedPrecisionPolicy("float32", "bfloat16", None)
    hyper_parallel.fully_shard(model, mesh=ranks_mesh(), mp_policy=policy)
    model(torch.full((1, 1), 35000.0)).sum().backward()
    gradient: Any = model.weight.grad
    return gradient.to_local().item()


def wrong() -> float:
    import torch
    import torch.distributed as dist

    gradient = torch.tensor([35000.0], dtype=torch.bfloat16).to(torch.float16)
    dist.all_reduce(gradient)
    return gradient.to(torch.bfloat16).item()
