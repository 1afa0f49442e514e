"""Unsharded parameters (NO_SHARD) are counted once for each rank."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="pytorch-88955",
    title="unsharded parameters counted world-size times",
    kind="ranks",
    source="pytorch#88955",
    condition="2 ranks, both with the whole gradient (3, 4)",
    shown_by="formula",
    wrong=50**0.5,
    right=5.0,
    how_we_know="9 + 16 = 25, on both ranks the same elements; added over ranks 50",
    why="FSDP with NO_SHARD keeps the whole gradient on every rank, as data parallelism does. Its norm took "
    "every rank's squares for those of a shard. A mesh that shards over one rank and replicates over the "
    "others says what is the case.",
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_weights(), 1.0).item()


def wrong() -> float:
    from hpcli.faults.parameters import over_ranks, squares

    return over_ranks(squares(_weights())) ** 0.5


def _weights() -> list[Any]:
    from hpcli.faults.parameters import ranks_mesh, with_gradient

    return [with_gradient([3.0, 4.0], ranks_mesh(2, 1), "R S0")]
