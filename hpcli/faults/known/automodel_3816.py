"""Each expert-parallel rank clips with its own norm."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry

ENTRY = Entry(
    id="automodel-3816",
    title="each expert-parallel rank has a norm of its own",
    kind="ranks",
    source="Automodel#3816",
    condition="2 expert-parallel ranks: a dense weight with norm 4 on both, experts with norm 40 on rank 0 "
    "and 0.4 on rank 1",
    shown_by="formula",
    wrong=ByRank((1616.0**0.5, 16.16**0.5)),
    right=1616.16**0.5,
    how_we_know="4^2 + 40^2 + 0.4^2 = 1616.16, its root 40.201493; rank 0 alone 40.199502, rank 1 alone "
    "4.019950",
    why="Experts are not replicated over their ranks, so no rank sees the whole model. Each clips by the "
    "norm of what it has, and the dense weights, which should be equal, are scaled by factors that differ "
    "tenfold. The replicas then drift apart silently.",
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_weights(), 1.0).item()


def wrong() -> float:
    from hpcli.faults.parameters import squares

    return squares(_weights()) ** 0.5


def _weights() -> list[Any]:
    """A dense weight on both ranks, and this rank's expert."""
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_gradient, with_local_gradient

    mesh = ranks_mesh()
    return [with_gradient([4.0], mesh, "R"), with_local_gradient([[40.0], [0.4]][dist.get_rank()], mesh, "S0")]
