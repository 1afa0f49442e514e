"""MindSpore's own clip squares float16 gradients in float16."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="burn-5699",
    title="a float16 norm of 500 clips to zero",
    kind="precision",
    source="burn#5699",
    condition="one process, MindSpore, float16 gradient (300, 400), max_norm 1: what is left of it",
    shown_by="stock",
    wrong=[0.0, 0.0],
    right=[0.6, 0.8],
    how_we_know="(300, 400) / 500; 300^2 = 90000 is above 65504, where float16 ends",
    why="The report is about another framework; mindspore.ops.clip_by_global_norm does the same. The "
    "squares of gradients above 255 are infinite in float16, and what is divided by an infinite norm is "
    "zero. Squares belong into float32.",
    ranks=(1,),
    seconds=1.0,
    platform="mindspore",
    tolerance=1e-3,
)


def right() -> list[float]:
    import hyper_parallel

    weight = _weight()
    hyper_parallel.clip_grad_norm_([weight], 1.0)
    return weight.grad.asnumpy().astype("float32").tolist()


def wrong() -> list[float]:
    from mindspore import ops

    (clipped,) = ops.clip_by_global_norm((_weight().grad,), 1.0)
    return clipped.asnumpy().astype("float32").tolist()


def _weight() -> Any:
    import mindspore as ms
    import numpy as np

    weight = ms.Parameter(ms.Tensor(np.zeros(2, np.float16)), name="weight")
    weight.grad = ms.Tensor(np.array([300.0, 400.0], np.float16))
    return weight
