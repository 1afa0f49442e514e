"""A gradient that is not finite on one rank makes that rank alone skip the step."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.entry import ByRank, Entry

ENTRY = Entry(
    id="verl-1506",
    title="ranks decide by themselves whether to skip a step",
    kind="precision",
    source="verl#1506",
    condition="a weight sharded over 2 ranks, gradient 1 on rank 0 and NaN on rank 1: does the rank take "
    "the step",
    shown_by="formula",
    wrong=ByRank((True, False)),
    right=False,
    how_we_know="a vector with an element that is no number has a norm that is no number, on every rank",
    why="Each rank looked at its own gradients to see whether they are finite. The rank with the NaN skips, "
    "the others take the step, and from then on the shards belong to different models. The global norm is "
    "the same bits everywhere, so it alone may decide.",
)


def right() -> bool:
    from hyper_parallel import clip_grad_norm_

    return math.isfinite(clip_grad_norm_([_weight()], 1.0).item())


def wrong() -> bool:
    from hpcli.faults.parameters import squares

    return math.isfinite(squares([_weight()]))


def _weight() -> Any:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    return with_local_gradient([[1.0], [math.nan]][dist.get_rank()], ranks_mesh(), "S0")
