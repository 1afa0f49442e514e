"""A rank without gradients returns early, and the others wait for it."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, Raises

ENTRY = Entry(
    id="areal-1139",
    title="a rank without gradients returns, the others wait",
    kind="missing",
    source="AReaL#1139",
    condition="a weight sharded over 2 ranks with gradient 3 on rank 0; on rank 1 it has none",
    shown_by="stock",
    wrong=ByRank((Raises("imed out"), 0.0)),
    right=3.0,
    how_we_know="sqrt(9) = 3; a rank without gradients adds 0",
    why="Stock torch returns 0 at once where no parameter has a gradient, before any collective. The ranks "
    "that do have some wait in their all-reduce until its time is over. A rank with nothing to add must say "
    "so, with the identity of the norm.",
    alone=True,
    timeout_seconds=4.0,
    seconds=5.0,
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([_weight()], 1.0).item()


def wrong() -> float:
    import torch

    norm: Any = torch.nn.utils.clip_grad_norm_([_weight()], 1.0)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def _weight() -> Any:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    weight = with_local_gradient([3.0], ranks_mesh(), "S0")
    if dist.get_rank() == 1:
        weight.grad = None
    return weight
