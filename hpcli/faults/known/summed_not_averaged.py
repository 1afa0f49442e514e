"""The loss is divided by the rank's share of the batch, and the gradients are summed over the ranks."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="gradients summed where the mean was meant",
    source="torchtitan#2318",
    rule="the loss is divided by the valid tokens of the global batch, gradients are summed",
    layout="fsdp{ranks}",
    cause="summed-not-averaged",
)
ENTRY = Entry(
    id="verl-4710",
    title="each rank divides by its own share of the batch, and ranks are summed",
    kind="pipeline",
    source="verl#4710",
    condition="2 ranks with one token each, gradient 3 and 5; the loss is the mean over tokens",
    shown_by="formula",
    wrong=8.0,
    right=4.0,
    how_we_know="(3 + 5) / 2 tokens = 4; a mean of one token each, summed over ranks, is 3 + 5",
    why="One backend divides by the tokens of a rank and averages over ranks, another sums. With the loss "
    "of the one and the reduction of the other the norm is too large by the number of ranks. Sum over ranks "
    "and division by the global batch belong together.",
)


def right() -> float:
    return _norm(tokens=2)


def wrong() -> float:
    return _norm(tokens=1)


def _norm(tokens: int) -> float:
    import torch
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = hyper_parallel.fully_shard(torch.nn.Linear(1, 1, bias=False), mesh=ranks_mesh())
    (model(torch.tensor([3.0 + 2 * dist.get_rank()])).sum() / tokens).backward()
    return hyper_parallel.clip_grad_norm_(model, 100.0).item()


def patch() -> None:
    import torch.distributed as dist

    from hpcli.train.torch_loss import GlobalLoss

    right = GlobalLoss.__call__

    def of_own_share(self: GlobalLoss, logits: Any, labels: Any) -> Any:
        loss = right(self, logits, labels)
        loss_of_share = loss * dist.get_world_size()
        return loss_of_share

    replace(GlobalLoss, "__call__", of_own_share)
