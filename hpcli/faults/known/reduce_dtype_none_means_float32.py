"""reduce_dtype None is read as an allocator reads a missing dtype: float32."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="reduce_dtype None read as float32",
    source="hyper-parallel issue-217",
    rule="None resolves to the gradient's native dtype, once, for all who ask",
    layout="fsdp{ranks}-bf16-native-reduce",
    cause="reduce-dtype-too-wide",
)
ENTRY = Entry(
    id="issue-217-torch",
    title="reduce_dtype None read as float32, on torch",
    kind="reduce",
    source="hyper-parallel gitcode#217",
    condition="bfloat16 computation with reduce_dtype None on 2 ranks: gradient 1 on rank 0 and 2^-10 on "
    "rank 1 reduced, and 256, 1 and 1 accumulated over micro-batches on rank 0",
    shown_by="planted",
    wrong={"reduced": 1.0009765625, "accumulated": 258.0},
    right={"reduced": 1.0, "accumulated": 256.0},
    how_we_know="bfloat16 has 8 significant bits, so 1 + 2^-10 rounds to 1, and 257 to 256; float32 would "
    "hold both sums",
    why="None means that gradients are reduced as they are, in bfloat16 here. An allocator that is given "
    "None makes float32, so a buffer has another dtype than what goes into it: MindSpore refuses that, "
    "torch reduces in float32 without being asked. One function resolves None, and layout, buffer, "
    "reduction and checks all ask it.",
)


def right() -> dict[str, float]:
    import torch.distributed as dist

    first = dist.get_rank() == 0
    return {
        "reduced": _gradient([1.0 if first else 2.0**-10]),
        "accumulated": _gradient([256.0, 1.0, 1.0] if first else [0.0, 0.0, 0.0]),
    }


def _gradient(parts: list[float]) -> float:
    """What one weight's gradient becomes of ``parts``, one in each micro-batch."""
    import torch

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model: Any = torch.nn.Linear(1, 2, bias=False)
    policy = hyper_parallel.MixedPrecisionPolicy("float32", "bfloat16", None)
    hyper_parallel.fully_shard(model, mesh=ranks_mesh(), mp_policy=policy)
    for number, part in enumerate(parts, 1):
        model.set_requires_gradient_sync(number == len(parts))
        model(torch.full((1, 1), part)).sum().backward()
    return model.weight.grad.to_local().item()


def patch() -> None:
    from hyper_parallel.core import precision

    right = precision.resolve_reduce_dtype
    replace(precision, "resolve_reduce_dtype", lambda reduce, native: right(reduce or "float32", native))
