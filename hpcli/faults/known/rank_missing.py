"""The last rank contributes nothing, as a rank that returns early does."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, Raises
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="a rank's contribution missing",
    source="Model-Optimizer#1621",
    rule="every rank of the scope takes part with all that it holds",
    layout="fsdp{ranks}",
    cause="rank-missing",
)
ENTRY = Entry(
    id="model-optimizer-1621",
    title="a gradient missing on one rank: a wrong number there, and the others wait",
    kind="missing",
    source=FAULT.source,
    condition="three 4x4 weights sharded over 2 ranks with gradients of ones; rank 1 lacks one of them",
    shown_by="stock",
    wrong=ByRank((Raises("imed out"), 24**0.5)),
    right=40**0.5,
    how_we_know="rank 0 has gradients of 3 x 8 ones, rank 1 of 2 x 8: sqrt(24 + 16) = 6.3246; sqrt(24) = "
    "4.8990, which stock torch was seen to return on rank 1, is the norm of neither",
    why="Stock torch stacks the norms of the gradients that are there, so ranks with other gradients issue "
    "other collectives. One of them matches by accident and gives a number, the next one waits for a "
    "partner that has gone. What takes part must follow from the layout, never from which gradients exist.",
    alone=True,
    timeout_seconds=4.0,
    seconds=5.0,
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_weights(), 1.0).item()


def wrong() -> float:
    import torch

    norm: Any = torch.nn.utils.clip_grad_norm_(_weights(), 1.0)
    return norm.full_tensor().item()


def _weights() -> list[Any]:
    import torch
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_gradient

    mesh = ranks_mesh()
    weights = [with_gradient(torch.ones(4, 4), mesh, "S0") for _ in range(3)]
    if dist.get_rank() == 1:
        weights[2].grad = None
    return weights


def patch() -> None:
    import torch.distributed as dist

    from hyper_parallel.platform.torch.grad_norm import combine

    gather = combine._gather_records

    def silent_last(scope: Any, record: Any) -> Any:
        last = dist.get_rank() == dist.get_world_size() - 1
        return gather(scope, record._replace(contributed=0.0) if last else record)

    replace(combine, "_gather_records", silent_last)
