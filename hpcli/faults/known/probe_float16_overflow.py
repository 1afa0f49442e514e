"""Two large float16 gradients clip to zero."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="probe-float16-overflow",
    title="large float16 gradients are clipped to nothing",
    kind="precision",
    source="torch 2.13, measured",
    condition="one process, float16 gradient (60000, 60000), max_norm 1000: the norm, and what is left of "
    "the gradient",
    shown_by="stock",
    wrong=[math.inf, 0.0, 0.0],
    right=[60000 * 2**0.5, 500 * 2**0.5, 500 * 2**0.5],
    how_we_know="60000 sqrt(2) = 84853 is above the 65504 of float16 and an ordinary number in float32; "
    "1000 / sqrt(2) = 707.1",
    why="Stock torch returns the norm in the dtype of the gradients, in which it is infinite although they "
    "are not. The coefficient is then zero, and the step vanishes without a word. A norm belongs into "
    "float32 whatever the gradients are in.",
    ranks=(1,),
    tolerance=1e-3,
)


def right() -> list[float]:
    from hyper_parallel import clip_grad_norm_

    return _clipped(clip_grad_norm_)


def wrong() -> list[float]:
    import torch

    return _clipped(torch.nn.utils.clip_grad_norm_)


def _clipped(clip: Any) -> list[float]:
    import torch

    from hpcli.faults.parameters import plain

    weight = plain([6e4, 6e4], torch.float16)
    norm = clip([weight], 1000.0).item()
    assert weight.grad is not None
    return [norm, *weight.grad.tolist()]
