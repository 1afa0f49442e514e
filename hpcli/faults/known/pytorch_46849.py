"""Clipping with a norm that is not finite turns gradients into zeros and NaN."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="pytorch-46849",
    title="one infinite gradient zeroes all the others",
    kind="precision",
    source="pytorch#46849",
    condition="one process, gradient (1, inf), max_norm 1: what is left of it",
    shown_by="stock",
    wrong=[0.0, math.nan],
    right=[1.0, math.inf],
    how_we_know="1 / inf = 0; 0 x 1 = 0, and 0 x inf is not a number",
    why="The coefficient of an infinite norm is zero, and zero times infinity is NaN. The optimizer then "
    "takes a step with zeros and NaN, and nobody is told. Here gradients of a norm that is not finite stay "
    "as they are, and the trainer skips the step and says so.",
    ranks=(1,),
)


def right() -> list[float]:
    from hyper_parallel import clip_grad_norm_

    return _clipped(clip_grad_norm_)


def wrong() -> list[float]:
    import torch

    return _clipped(torch.nn.utils.clip_grad_norm_)


def _clipped(clip: Any) -> list[float]:
    from hpcli.faults.parameters import plain

    weight = plain([1.0, math.inf])
    clip([weight], 1.0)
    assert weight.grad is not None
    return weight.grad.tolist()
