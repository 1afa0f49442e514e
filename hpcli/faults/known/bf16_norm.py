"""The norm is accumulated in bfloat16."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="norm accumulated in bfloat16",
    source="torchtitan#4135",
    rule="the norm is accumulated in float32 rows that are combined in float64",
    layout="fsdp{ranks}",
    cause="norm-in-low-precision",
)
ENTRY = Entry(
    id="torchtitan-4135",
    title=FAULT.title,
    kind="precision",
    source=FAULT.source,
    condition="one process, gradients of one element: 705.3, and 719.4",
    shown_by="planted",
    wrong={"of 705.3": 704.0, "of 719.4": 720.0},
    right={"of 705.3": 705.3, "of 719.4": 719.4},
    how_we_know="bfloat16 has 8 significant bits: between 512 and 1024 its steps are 4, so 705.3 becomes "
    "704 and 719.4 becomes 720",
    why="Norms of bfloat16 gradients come out in bfloat16 unless another dtype is asked for. The curve then "
    "moves in steps, and the value depends on how the parameters were grouped. The sum must be made in "
    "float32 at least, and not be rounded before it is reduced.",
    ranks=(1,),
)


def right() -> dict[str, float]:
    from hpcli.faults.parameters import plain
    from hyper_parallel import clip_grad_norm_

    return {f"of {value}": clip_grad_norm_([plain([value])], 1.0).item() for value in (705.3, 719.4)}


def patch() -> None:
    import torch

    from hyper_parallel.platform.torch.grad_norm import arrangement

    def rounded(flat: Any, p: float) -> float:
        return float(torch.linalg.vector_norm(flat.bfloat16(), p, dtype=torch.bfloat16))

    replace(arrangement, "norm_of_flat", rounded)
    replace(arrangement, "norm_of_pack", lambda tensors, p, elements=None: rounded(torch.cat([t.flatten() for t in tensors]), p))
