"""The norm of bfloat16 gradients depends on how they are grouped."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="pytorch-194033",
    title="the norm of bfloat16 gradients depends on their grouping",
    kind="precision",
    source="pytorch#194033",
    condition="one process, 700 bfloat16 gradient elements of 1, as one tensor, and as two of 175 and 525",
    shown_by="stock",
    wrong={"700": 26.5, "175 + 525": 26.375},
    right={"700": 700**0.5, "175 + 525": 700**0.5},
    how_we_know="sqrt(700) = 26.4575; in bfloat16 it is 26.5; sqrt(175) is 13.25 and sqrt(525) 22.875, and "
    "those make 26.375",
    why="Each tensor's norm is rounded to bfloat16 before the norms are combined, and the result is rounded "
    "again. The same gradients, fused or sharded otherwise, then have another norm, so no two layouts "
    "agree. Here every sum is made in float32 rows that are combined in float64.",
    ranks=(1,),
)


def right() -> dict[str, float]:
    from hyper_parallel import clip_grad_norm_

    return _norms(clip_grad_norm_)


def wrong() -> dict[str, float]:
    import torch

    return _norms(torch.nn.utils.clip_grad_norm_)


def _norms(clip: Any) -> dict[str, float]:
    import torch

    from hpcli.faults.parameters import plain

    def norm(*sizes: int) -> float:
        return clip([plain(torch.ones(size), torch.bfloat16) for size in sizes], 1e9).item()

    return {"700": norm(700), "175 + 525": norm(175, 525)}
