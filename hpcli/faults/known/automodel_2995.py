"""An expert that got no token has no gradient on its rank."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, Raises

ENTRY = Entry(
    id="automodel-2995",
    title="an expert without tokens has no gradient",
    kind="missing",
    source="Automodel#2995",
    condition="2 expert-parallel ranks, expert 0 with gradient (3, 4), expert 1 without tokens",
    shown_by="formula",
    wrong=ByRank((5.0, Raises("stack expects a non-empty TensorList"))),
    right=5.0,
    how_we_know="sqrt(9 + 16) = 5, and the other expert adds 0",
    why="The router sends no token to an expert, so autograd never reaches it and .grad stays None. Code "
    "that stacks the norms of what is there has nothing to stack on that rank, and fails or hangs the "
    "others. Which parameters take part is the layout's to say.",
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([_expert()], 1.0).item()


def wrong() -> float:
    """The norm of this rank, which it would reduce next."""
    import torch

    gradients = [expert.grad.to_local() for expert in [_expert()] if expert.grad is not None]
    return torch.stack([gradient.norm() for gradient in gradients]).norm().item()


def _expert() -> Any:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    expert = with_local_gradient([[3.0, 4.0], [0.0, 0.0]][dist.get_rank()], ranks_mesh(), "S0")
    if dist.get_rank() == 1:
        expert.grad = None
    return expert
