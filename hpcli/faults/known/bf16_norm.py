"""The norm is accumulated in bfloat16."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="norm accumulated in bfloat16",
    source="torchtitan#4135",
    rule="the norm is accumulated in float32 rows that are combined in float64",
    layout="fsdp{ranks}",
    cause="norm-in-low-precision",
    wrong="705.3 becomes 704, 719.4 becomes 720",
    right="705.3 and 719.4",
    why="bfloat16 has 8 significant bits: at 704 its steps are 4",
)


def patch() -> None:
    import torch

    from hyper_parallel.platform.torch.grad_norm import arrangement

    def rounded(flat: Any, p: float) -> float:
        return float(torch.linalg.vector_norm(flat.bfloat16(), p, dtype=torch.bfloat16))

    replace(arrangement, "norm_of_flat", rounded)
    replace(arrangement, "norm_of_pack", lambda tensors, p: rounded(torch.cat([t.flatten() for t in tensors]), p))
