"""Accumulated gradients are clipped before they are divided by the number of micro-batches."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="mindone-231",
    title="accumulated gradients are clipped undivided",
    kind="pipeline",
    source="mindone#231",
    condition="one process, MindSpore, 2 micro-batches of one token, each with gradient 1; the loss is the "
    "mean over the tokens of the step",
    shown_by="formula",
    wrong=2.0,
    right=1.0,
    how_we_know="2 tokens with gradient 1, divided by 2 tokens",
    why="The sum of the micro-batches' gradients went to the clip, and the division by their number came "
    "later, or never. The norm is then as many times too large as there are micro-batches, and clipping "
    "sets in where it should not. A loss that is divided by the tokens of the step makes every order right.",
    ranks=(1,),
    seconds=1.0,
    platform="mindspore",
)


def right() -> float:
    return _norm(tokens_of_the_step=2)


def wrong() -> float:
    return _norm(tokens_of_the_step=1)


def _norm(tokens_of_the_step: int) -> float:
    import mindspore as ms
    import numpy as np

    import hyper_parallel
    from hyper_parallel.platform.mindspore import autograd

    weight = ms.Parameter(ms.Tensor(np.zeros(1, np.float32)), name="weight")
    total: Any = 0.0
    for _ in range(2):
        with autograd.recording():
            loss = (weight * 1.0).sum() / tokens_of_the_step
        (gradient,) = autograd.backward(loss, None, [weight])
        total = gradient if isinstance(total, float) else total + gradient
    weight.grad = total
    return float(hyper_parallel.clip_grad_norm_([weight], 1.0))
