"""The experts' part of the norm is averaged over the expert-parallel ranks."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="deepspeed-5259",
    title="experts enter the norm as a mean over their ranks",
    kind="ranks",
    source="DeepSpeed#5259",
    condition="2 expert-parallel ranks: a dense weight with norm 4 on both, experts with norm 40 on rank 0 "
    "and 0.4 on rank 1",
    shown_by="formula",
    wrong=(16.0 + 20.2**2) ** 0.5,
    right=1616.16**0.5,
    how_we_know="4^2 + 40^2 + 0.4^2 = 1616.16; the mean of the experts' norms is 20.2, and 16 + 20.2^2 = "
    "424.04",
    why="The mean of the norms over the expert-parallel ranks was added to the dense part. A mean is what "
    "data parallelism does to gradients of one parameter, and here the parameters differ. All experts "
    "belong to the model, so all their squares count.",
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_weights(), 1.0).item()


def wrong() -> float:
    from hpcli.faults.parameters import over_ranks, squares

    dense, expert = _weights()
    return (squares([dense]) + over_ranks(squares([expert]) ** 0.5, "avg") ** 2) ** 0.5


def _weights() -> list[Any]:
    """A dense weight on both ranks, and this rank's expert."""
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_gradient, with_local_gradient

    mesh = ranks_mesh()
    return [with_gradient([4.0], mesh, "R"), with_local_gradient([[40.0], [0.4]][dist.get_rank()], mesh, "S0")]
