"""Activation checkpointing: of a cell's activations only its input is kept, and backward computes the rest again
(Chen et al., "Training deep nets with sublinear memory cost", 2016).

MindSpore's own ``recompute`` cannot be used over sharded parameters: its variant for functions relies on the same hooks for saved tensors
that free whole parameters, and its variant for cells does not know a cell by a class of its own.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms

from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.cells import extend


def recompute_in_backward(cell: ms.nn.Cell) -> None:
    """Keep of the activations of ``cell`` its first argument alone, in place.

    To be called after ``fully_shard`` on a cell that is, or is one of, a unit's: backward then gathers its parameters again. The first
    argument is one tensor, and so is the output.
    """
    extend(cell, _Recomputed, {})


class _Recomputed:
    """Mixed into a cell."""

    def construct(self, x: ms.Tensor, *arguments: Any, **options: Any) -> ms.Tensor:
        """The cell's own computation, which backward makes again."""
        compute = super().construct  # type: ignore[misc]
        if not autograd.is_recording():
            return compute(x, *arguments, **options)
        shards = [p for p in self.get_parameters() if p.requires_grad]  # type: ignore[attr-defined]
        return _Recompute.apply((lambda value: compute(value, *arguments, **options), shards), x, *shards)


class _Recompute(autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: tuple[Any, list[ms.Parameter]], x: ms.Tensor, *shards: ms.Parameter) -> ms.Tensor:
        ctx.compute, ctx.shards = what
        ctx.save_for_backward(x)
        with autograd.no_grad():
            return ctx.compute(x)

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with autograd.recording():
            again = autograd.requiring_grad(autograd.detached(x))
            output = ctx.compute(again)
        found = autograd.backward(output, gradient.contiguous(), [again, *ctx.shards])
        return (None, *found)
