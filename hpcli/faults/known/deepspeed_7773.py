"""Gradients of micro-batches are summed where their mean was meant."""

from __future__ import annotations

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="deepspeed-7773",
    title="gradient accumulation sums the micro-batches' means",
    kind="pipeline",
    source="DeepSpeed#7773",
    condition="4 micro-batches of one token each, every gradient 1, the loss being the mean over the tokens "
    "of the step",
    shown_by="formula",
    wrong=4.0,
    right=1.0,
    how_we_know="4 tokens with gradient 1, divided by 4 tokens",
    why="Each micro-batch's loss was a mean over its own tokens, and backward adds gradients up. The step "
    "is then as many times too large as there are micro-batches, and so is the norm. A loss divided by the "
    "tokens of the whole step needs no factor later.",
    ranks=(1,),
)


def right() -> float:
    return _accumulated(tokens_of_the_step=4)


def wrong() -> float:
    return _accumulated(tokens_of_the_step=1)


def _accumulated(tokens_of_the_step: int) -> float:
    import torch

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = torch.nn.Linear(1, 1, bias=False)
    hyper_parallel.fully_shard(model, mesh=ranks_mesh())
    for _ in range(4):
        (model(torch.ones(1)).sum() / tokens_of_the_step).backward()
    return hyper_parallel.clip_grad_norm_(model, 1.0).item()
