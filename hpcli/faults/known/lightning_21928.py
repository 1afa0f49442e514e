"""error_if_nonfinite is accepted and never looked at."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="lightning-21928",
    title="error_if_nonfinite is ignored under FSDP",
    kind="precision",
    source="Lightning#21928",
    condition="a weight sharded over 2 ranks, NaN on rank 1, error_if_nonfinite=True",
    shown_by="formula",
    wrong=math.nan,
    right=Raises("gradients that are not finite: rank 1: index 0", "NonFiniteNormError"),
    how_we_know="the flag asks for an exception, on all ranks, else those that go on wait for those that do "
    "not",
    why="The strategy took the flag and called the engine's clip without it. Training went on with NaN, "
    "although it was asked to stop. Here every rank raises the same error, and it names the rank and the "
    "parameter.",
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([_weight()], 1.0, error_if_nonfinite=True).item()


def wrong() -> float:
    import torch

    def clip_grad_norm(parameters: list[Any], max_norm: float, error_if_nonfinite: bool) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    return clip_grad_norm([_weight()], 1.0, error_if_nonfinite=True).full_tensor().item()


def _weight() -> Any:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    return with_local_gradient([[1.0], [math.nan]][dist.get_rank()], ranks_mesh(), "S0")
