"""A list of plain tensors and DTensors, as tensor parallelism leaves it."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="pytorch-121020",
    title="no norm of plain parameters beside DTensors",
    kind="dtensor",
    source="pytorch#121020",
    condition="2 tensor-parallel ranks: a sharded weight with gradient (1, 2) and a plain norm weight with "
    "gradient (2, 4) on both",
    shown_by="stock",
    wrong=Raises("got mixed torch.Tensor and DTensor"),
    right=5.0,
    how_we_know="1 + 4 + 4 + 16 = 25; the plain weight is one parameter, held by both ranks",
    why="Tensor parallelism shards the large matrices and leaves small weights as they are. Stock torch "
    "hands both to one foreach operation, which refuses. A plain parameter beside DTensors is a replicated "
    "one: it counts once, not once a rank.",
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_weights(), 1.0).item()


def wrong() -> float:
    import torch

    norm: Any = torch.nn.utils.clip_grad_norm_(_weights(), 1.0)
    return norm.full_tensor().item()


def _weights() -> list[Any]:
    from hpcli.faults.parameters import plain, ranks_mesh, with_gradient

    return [with_gradient([1.0, 2.0], ranks_mesh(), "S0"), plain([2.0, 4.0])]
