"""Every micro-batch's loss is the mean over its own tokens, and the means are averaged."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="mean of means where micro-batches have unequal tokens",
    source="trl#3231",
    rule="the loss is the sum over tokens divided by the valid tokens of the global batch",
    layout="fsdp{ranks}-accumulation",
    cause="mean-of-means",
)
ENTRY = Entry(
    id="trl-3231",
    title=FAULT.title,
    kind="pipeline",
    source=FAULT.source,
    condition="2 ranks: rank 0 has 1 token with gradient 4, rank 1 has 3 tokens with gradient 0",
    shown_by="formula",
    wrong=2.0,
    right=1.0,
    how_we_know="4 over 4 tokens is 1; the means are 4/1 and 0/3, and their mean is 2",
    why="Each rank divides by its own number of tokens, and the reduction averages over ranks. Tokens on "
    "ranks with few of them then weigh more, and the loss depends on how the batch was cut. The sum of all "
    "losses must be divided once, by the tokens of the global batch.",
)


def _loss(model: Any) -> Any:
    """The sum of the losses of this rank's tokens."""
    import torch
    import torch.distributed as dist

    tokens = [[[4.0]], [[0.0], [0.0], [0.0]]][dist.get_rank()]
    return model(torch.tensor(tokens)).sum(), len(tokens)


def right() -> float:
    import torch

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = torch.nn.Linear(1, 1, bias=False)
    hyper_parallel.fully_shard(model, mesh=ranks_mesh())
    (_loss(model)[0] / 4).backward()
    return model.weight.grad.full_tensor().item()  # type: ignore[union-attr]


def wrong() -> float:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    total, tokens = _loss(model)
    (total / tokens).backward()
    return model.module.weight.grad.item()


def patch() -> None:
    import torch.distributed as dist

    from hpcli.data.text import IGNORED
    from hpcli.train.torch_loss import GlobalLoss
    from hpcli.train.torch_schedule import Accumulation

    run, right = Accumulation.run, GlobalLoss.__call__
    count = [1]

    def counted(self: Accumulation, micro_batches: Any, progress: Any) -> Any:
        count[0] = len(micro_batches) * dist.get_world_size()
        return run(self, micro_batches, progress)

    def of_own_tokens(self: GlobalLoss, logits: Any, labels: Any) -> Any:
        own = int((labels != IGNORED).sum())
        return right(self, logits, labels) * (self.valid_tokens / (max(own, 1) * count[0]))

    replace(Accumulation, "run", counted)
    replace(GlobalLoss, "__call__", of_own_tokens)
