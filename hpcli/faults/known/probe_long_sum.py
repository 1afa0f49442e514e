"""A float32 sum of ten million squares."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Not

ENTRY = Entry(
    id="probe-long-sum",
    title="the norm of 10 million elements is off by 0.8 %",
    kind="precision",
    source="torch 2.13, measured",
    condition="one process, one float32 gradient of 10,000,000 elements of 0.1: the norm over the exact one",
    shown_by="stock",
    wrong=Not(1.0),
    right=1.0,
    how_we_know="the exact norm is sqrt(10,000,000) = 3162.2777 times what float32 makes of 0.1; both norms "
    "are divided by it",
    why="On the CPU, stock torch adds the squares up in a few long runs of float32. When the sum is large, "
    "each square is rounded to the same too small number, so errors do not cancel but grow with the length. "
    "Rows of 256 that are combined in float64 take no longer.",
    ranks=(1,),
    tolerance=1e-7,
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return _over_the_exact(clip_grad_norm_)


def wrong() -> float:
    import torch

    return _over_the_exact(torch.nn.utils.clip_grad_norm_)


def _over_the_exact(clip: Any) -> float:
    import torch

    from hpcli.faults.parameters import plain

    elements, value = 10_000_000, torch.tensor(0.1)
    return clip([plain(value.expand(elements).clone())], 1e9).item() / (float(value) * elements**0.5)
