"""Local squares of all parameters are summed over the ranks, whether sharded or replicated."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="gitcode-178",
    title="squares of sharded and replicated parameters summed alike",
    kind="ranks",
    source="hyper-parallel gitcode#178",
    condition="4 ranks: a 4x4 weight of ones as gradient, Shard(0), and a bias of 4 ones, replicated",
    shown_by="formula",
    wrong=32**0.5,
    right=20**0.5,
    how_we_know="16 + 4 = 20; with the bias counted on all four ranks 16 + 16 = 32",
    why="One all-reduce over the squares of everything is right for what is sharded. What is replicated is "
    "counted once on each rank, and the loss does not move, since only the clip coefficient is off. Whether "
    "a piece counts here must follow from its layout.",
    ranks=(4,),
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_weights(), 1.0).item()


def wrong() -> float:
    from hpcli.faults.parameters import over_ranks, squares

    return over_ranks(squares(_weights())) ** 0.5


def _weights() -> list[Any]:
    import torch

    from hpcli.faults.parameters import ranks_mesh, with_gradient

    mesh = ranks_mesh()
    return [with_gradient(torch.ones(4, 4), mesh, "S0"), with_gradient(torch.ones(4), mesh, "R")]
