"""Half-precision gradients are squared in half precision."""

from __future__ import annotations

import math
from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="fairscale-263",
    title="squares of float16 gradients overflow",
    kind="precision",
    source="fairscale#263",
    condition="one process, float16 gradients of one element: 5000, 256, 255",
    shown_by="formula",
    wrong={"of 5000": math.inf, "of 256": math.inf, "of 255": 255.0},
    right={"of 5000": 5000.0, "of 256": 256.0, "of 255": 255.0},
    how_we_know="float16 ends at 65504; 256^2 = 65536 is above it, 255^2 = 65025 is not",
    why="float16 holds gradients up to 65504, but their squares only up to 255. A norm that is accumulated "
    "in the dtype of the gradients is infinite long before a gradient is. Squares must be added up in "
    "float32 at least.",
    ranks=(1,),
    tolerance=1e-3,
)


def right() -> dict[str, float]:
    from hyper_parallel import clip_grad_norm_

    return {f"of {value}": clip_grad_norm_([_weight(value)], 1e9).item() for value in (5000, 256, 255)}


def wrong() -> dict[str, float]:
    return {f"of {value}": float((_weight(value).grad * _weight(value).grad).sum().sqrt()) for value in (5000, 256, 255)}


def _weight(value: int) -> Any:
    import torch

    from hpcli.faults.parameters import plain

    return plain([float(value)], torch.float16)
