"""The inf-norm of an empty shard raises on the rank that has it."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, Raises

ENTRY = Entry(
    id="torchrec-3809",
    title="the inf-norm of an empty shard raises on one rank",
    kind="shards",
    source="torchrec#3809",
    condition="a 3x2 weight with gradient 1..6, Shard(0) over 4 ranks, so that rank 3 holds nothing; norm "
    "type inf",
    shown_by="stock",
    wrong=ByRank((Raises(""), Raises(""), Raises(""), Raises("cannot compute the infinity norm on an empty tensor"))),
    right=6.0,
    how_we_know="the largest of 1..6; an empty shard adds nothing to a maximum",
    why="The maximum of nothing is undefined, so the kernel raises, on the one rank whose shard is empty. "
    "The others wait in their all-reduce until it fails. The part of an empty shard is the identity of the "
    "combination: 0 for a maximum.",
    ranks=(4,),
    alone=True,
    timeout_seconds=4.0,
    seconds=5.0,
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([_weight()], 1.0, float("inf")).item()


def wrong() -> float:
    import torch

    norm: Any = torch.nn.utils.clip_grad_norm_([_weight()], 1.0, float("inf"))
    return norm.full_tensor().item()


def _weight() -> Any:
    from hpcli.faults.parameters import ranks_mesh, with_gradient

    return with_gradient([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], ranks_mesh(), "S0")
