"""The gradients are squared whatever the norm type."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="deepspeed-8313",
    title="gradients squared whatever the norm type",
    kind="shards",
    source="DeepSpeed#8313",
    condition="gradients 3 and 4 on 2 ranks, norm types 1 and 3",
    shown_by="formula",
    wrong={"p = 1": 25.0, "p = 3": 25 ** (1 / 3)},
    right={"p = 1": 7.0, "p = 3": 91 ** (1 / 3)},
    how_we_know="3 + 4 = 7; 27 + 64 = 91, its cube root 4.497941; 9 + 16 = 25, its cube root 2.924018",
    why="The local part was a sum of squares for every p, and only the root at the end asked for it. For p "
    "= 2 nothing shows. Local part, combination and root are one definition of p, and live in one place.",
)


def right() -> dict[str, float]:
    from hyper_parallel import clip_grad_norm_

    return {f"p = {p}": clip_grad_norm_([_weight()], 1.0, p).item() for p in (1, 3)}


def wrong() -> dict[str, float]:
    from hpcli.faults.parameters import over_ranks, squares

    return {f"p = {p}": over_ranks(squares([_weight()])) ** (1 / p) for p in (1, 3)}


def _weight() -> Any:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    return with_local_gradient([3.0 + dist.get_rank()], ranks_mesh(), "S0")
