"""Every micro-batch's loss is the mean over its own tokens, and the means are averaged."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="mean of means where micro-batches have unequal tokens",
    source="trl#3231",
    rule="the loss is the sum over tokens divided by the valid tokens of the global batch",
    layout="fsdp{ranks}-accumulation",
    cause="mean-of-means",
    wrong="1 token with gradient 4 on one rank, 3 with 0 on the other: 2",
    right="1",
    why="4 over 4 tokens is 1; the mean of 4 and 0 is 2",
)


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
