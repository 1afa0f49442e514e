"""Products that MindSpore 2.10 lacks on a CPU in low precision, or gets wrong for empty tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import mint

from hyper_parallel.platform.mindspore.autograd import Function
from hyper_parallel.platform.mindspore.tensors import empty, on_host, writable, zeros


def linear(x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
    """``x`` times the transpose of ``weight``: (..., in), (out, in) to (..., out), all of one dtype.

    On a CPU MindSpore has no matrix product in low precision. It is then computed in float32 and rounded once, which gives torch's
    bits; what is saved for backward is the low-precision weight itself, so that a sharded unit can free it.

    Without rows (an expert that no token chose) the weight's gradient is zero: MindSpore's own product over an empty dimension
    leaves whatever was in memory.
    """
    if not x.size or (on_host() and weight.dtype in (ms.bfloat16, ms.float16)):
        return _Linear.apply(x, weight)
    return mint.nn.functional.linear(x, weight)


def grouped_linear(rows: ms.Tensor, weight: ms.Tensor, counts: Sequence[int]) -> ms.Tensor:
    """Each expert's own ``linear`` for its rows: (rows, in), (experts, out, in) to (rows, out), all of one dtype.

    The whole stack of weights is saved for backward as one tensor, so that a sharded unit can free it; slices of it would keep it
    alive. (MindSpore 2.10 also fails in the derivative of an empty slice at the end: "StridedSliceGrad, 0 input memory out of bounds".)

    Args:
        counts: how many of the ``rows``, which are sorted by expert, each expert has; some may have none.
    """
    return _GroupedLinear.apply(rows, weight, tuple(counts))


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, rows: ms.Tensor, weight: ms.Tensor, counts: Sequence[int]) -> ms.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        output = empty((rows.shape[0], weight.shape[1]), rows.dtype)
        if not rows.size:
            return output
        x, w, y = writable(rows.contiguous()), writable(weight), writable(output)
        for expert, start, count in _ranges(counts):
            y.narrow(0, start, count).copy_(x.narrow(0, start, count).float().matmul(w[expert].float().T))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight = empty(rows.shape, rows.dtype), zeros(weight.shape, weight.dtype)
        if not rows.size:
            return of_rows, of_weight, None
        x, w, g = writable(rows.contiguous()), writable(weight), writable(gradient.contiguous())
        dx, dw = writable(of_rows), writable(of_weight)
        for expert, start, count in _ranges(ctx.counts):
            wide = g.narrow(0, start, count).float()
            dx.narrow(0, start, count).copy_(wide.matmul(w[expert].float()))
            dw[expert].copy_(wide.T.matmul(x.narrow(0, start, count).float()))
        return of_rows, of_weight, None


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Expert, first row and number of rows, of those that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, start, count
        start += count


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        ctx.save_for_backward(x, weight)
        if not x.size:
            return zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
        return mint.matmul(x.astype(ms.float32), weight.astype(ms.float32).T).astype(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        x, weight = ctx.saved_tensors
        if not x.size:
            return zeros(x.shape, x.dtype), zeros(weight.shape, weight.dtype)
        wide = gradient.astype(ms.float32)
        rows = wide.reshape((-1, weight.shape[0]))
        of_weight = mint.matmul(rows.T, x.astype(ms.float32).reshape((-1, weight.shape[1])))
        of_x = mint.matmul(wide, weight.astype(ms.float32))
        return of_x.astype(x.dtype), of_weight.astype(weight.dtype)
