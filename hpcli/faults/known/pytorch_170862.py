"""The logged norm is the rank's own, because a DTensor's item() was."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry

ENTRY = Entry(
    id="pytorch-170862",
    title="the logged norm is that of the rank's shard",
    kind="dtensor",
    source="pytorch#170862",
    condition="a weight sharded over 2 ranks with gradients 3 and 4; the number that each rank logs",
    shown_by="mended",
    wrong=ByRank((3.0, 4.0)),
    right={"library": 5.0, "stock torch": 5.0},
    how_we_know="sqrt(9 + 16) = 5; the shards have norms 3 and 4",
    why="The norm came back as a DTensor whose item() gave the part of this rank, unless full_tensor() was "
    "called. Torch 2.13 returns a replicated one, which was run here. This library returns a plain tensor, "
    "of which there is only one reading.",
)


def right() -> dict[str, float]:
    import torch

    from hyper_parallel import clip_grad_norm_

    return {
        "library": clip_grad_norm_([_weight()], 1.0).item(),
        "stock torch": torch.nn.utils.clip_grad_norm_([_weight()], 1.0).item(),
    }


def wrong() -> float:
    """What a DTensor with a partial norm gives to who asks for its number: that of this rank."""
    return float(_weight().grad.to_local().norm())


def _weight() -> Any:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    return with_local_gradient([3.0 + dist.get_rank()], ranks_mesh(), "S0")
