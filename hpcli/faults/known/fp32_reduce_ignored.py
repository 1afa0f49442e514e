"""Gradients are reduced in the compute dtype although float32 was asked for."""

from __future__ import annotations

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="float32 reduction asked for and not made",
    source="Megatron-LM (ISEEKYAN)#149",
    rule="reduce_dtype reaches accumulation and reduction",
    layout="fsdp{ranks}-bf16-fp32-reduce",
    cause="accumulated-too-narrow",
)
ENTRY = Entry(
    id="iseekyan-149",
    title=FAULT.title,
    kind="reduce",
    source=FAULT.source,
    condition="bfloat16 computation with reduce_dtype float32 on 2 ranks, 3 micro-batches with gradients "
    "256, 1 and 1 on rank 0",
    shown_by="planted",
    wrong=256.0,
    right=258.0,
    how_we_know="256 + 1 + 1 = 258 is exact in float32; in bfloat16 the steps above 256 are 2, and 257 "
    "rounds to the even 256, twice",
    why="The reduce dtype was applied to the reduction over ranks and not to the accumulation over "
    "micro-batches. Every small gradient that meets a large sum is then lost, however many of them there "
    "are. Accumulation and reduction must ask the same function for their dtype.",
)


def right() -> float:
    import torch
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = torch.nn.Linear(1, 2, bias=False)
    policy = hyper_parallel.MixedPrecisionPolicy("float32", "bfloat16", "float32")
    hyper_parallel.fully_shard(model, mesh=ranks_mesh(), mp_policy=policy)
    for number, gradient in enumerate((256.0, 1.0, 1.0)):
        model.set_requires_gradient_sync(number == 2)  # type: ignore[operator]
        model(torch.full((1, 1), gradient if dist.get_rank() == 0 else 0.0)).sum().backward()
    return model.weight.grad.to_local().item()  # type: ignore[union-attr]


def patch() -> None:
    from hyper_parallel.core import precision

    replace(precision, "resolve_reduce_dtype", lambda reduce, native: precision.dtype_name(native))
