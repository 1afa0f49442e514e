"""Cross entropy of logits of which each tensor-parallel rank holds a part of the vocabulary (Shoeybi et al., "Megatron-LM", 2019)."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import mint, ops

from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.autograd import Function
from hyper_parallel.platform.mindspore.collectives import Group


def vocabulary_parallel_cross_entropy(logits: ms.Tensor, targets: ms.Tensor, group: Group, ignore: int = -100) -> ms.Tensor:
    """The sum over tokens of -log softmax(logits)[target], computed in float32 without gathering the logits.

    Args:
        logits: (tokens, vocabulary / ranks), this rank's part.
        targets: (tokens,), integers that count through the whole vocabulary, the same on every rank.
        group: the ranks, in the order of their parts.
        ignore: tokens of this target count nothing.

    Returns:
        0-dim float32, the same on every rank.
    """
    return _CrossEntropy.apply(logits, targets, group, ignore)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: ms.Tensor, targets: ms.Tensor, group: Group, ignore: int) -> ms.Tensor:
        wide = logits.astype(ms.float32)
        width = wide.shape[1]
        largest = collectives.all_reduce(mint.max(wide, dim=1, keepdim=True)[0] * 1, group, "max").wait()
        powers = mint.exp(wide - largest)
        columns = ops.arange(group.position * width, (group.position + 1) * width)
        chosen = (mint.unsqueeze(targets, 1) == mint.unsqueeze(columns.astype(targets.dtype), 0)).astype(ms.float32)
        total = collectives.all_reduce(_pair(powers, wide - largest, chosen), group).wait()
        counts = (targets != ignore).astype(ms.float32)
        ctx.save_for_backward(powers / mint.unsqueeze(total[0], 1), chosen, counts)
        ctx.dtype = logits.dtype
        return ((mint.log(total[0]) - total[1]) * counts).sum()

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        probabilities, chosen, counts = ctx.saved_tensors
        return ((probabilities - chosen) * mint.unsqueeze(counts, 1) * gradient).astype(ctx.dtype), None, None, None


def _pair(powers: ms.Tensor, shifted: ms.Tensor, chosen: ms.Tensor) -> ms.Tensor:
    """(2, tokens): the sum of exponentials, and the target's logit where it is here."""
    rows = powers.sum(1), (shifted * chosen).sum(1)
    return mint.cat([mint.unsqueeze(row, 0) for row in rows])
