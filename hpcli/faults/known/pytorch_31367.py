"""A negative max_norm turns every gradient around."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="pytorch-31367",
    title="a negative max_norm flips the sign of every gradient",
    kind="shards",
    source="pytorch#31367",
    condition="one process, gradient (3, 4), max_norm -1",
    shown_by="stock",
    wrong=[-0.6, -0.8],
    right=Raises("max_norm must be a number >= 0", "ValueError"),
    how_we_know="-1 / 5 times (3, 4)",
    why="The coefficient is max_norm over the norm, and nothing asks for its sign. A typing error in a "
    "configuration then makes training climb instead of descend. A bound on a length cannot be negative, so "
    "it is refused.",
    ranks=(1,),
)


def right() -> list[float]:
    from hyper_parallel import clip_grad_norm_

    return _clipped(clip_grad_norm_)


def wrong() -> list[float]:
    import torch

    return _clipped(torch.nn.utils.clip_grad_norm_)


def _clipped(clip: Any) -> list[float]:
    from hpcli.faults.parameters import plain

    weight = plain([3.0, 4.0])
    clip([weight], -1.0)
    assert weight.grad is not None
    return weight.grad.tolist()
