"""The 0-norm depends on how the vector is cut into tensors."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="metal-55587",
    title="norm type 0 counts tensors, not elements",
    kind="shards",
    source="tt-metal#55587",
    condition="one process, two gradients (3, 0) and (-4, 1); norm types 0, inf and -inf",
    shown_by="stock",
    wrong={"0": 2.0, "inf": 4.0, "-inf": 0.0},
    right={"0": 3.0, "inf": 4.0, "-inf": 0.0},
    how_we_know="3, -4 and 1 are not zero; the largest magnitude is 4, the smallest 0",
    why="Stock torch takes the norm of the tensors' norms, which for p = 0 counts tensors that are not all "
    "zero. The number then depends on how parameters are sharded or fused. Seen as one flat vector, the "
    "0-norm is the number of its elements that are not zero.",
    ranks=(1,),
)


def right() -> dict[str, float]:
    from hyper_parallel import clip_grad_norm_

    return _norms(clip_grad_norm_)


def wrong() -> dict[str, float]:
    import torch

    return _norms(torch.nn.utils.clip_grad_norm_)


def _norms(clip: Any) -> dict[str, float]:
    from hpcli.faults.parameters import plain

    return {p: clip([plain([3.0, 0.0]), plain([-4.0, 1.0])], 1e9, float(p)).item() for p in ("0", "inf", "-inf")}
