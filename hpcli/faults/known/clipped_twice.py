"""A parameter that is listed twice is scaled twice."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="gradients scaled once for every time that they are listed",
    source="torch 2.13, measured",
    rule="every gradient is scaled once, however often it is listed",
    layout="fsdp{ranks}",
    cause="clipped-twice",
)
ENTRY = Entry(
    id="probe-listed-twice",
    title="a parameter listed twice counts twice and is scaled twice",
    kind="ranks",
    source=FAULT.source,
    condition="one process, a parameter with gradient (20, 20) listed twice, max_norm 1: the norm, and that "
    "of what is left",
    shown_by="stock",
    wrong={"norm": 40.0, "norm after clipping": 800**0.5 / 1600},
    right={"norm": 800**0.5, "norm after clipping": 1.0},
    how_we_know="sqrt(20^2 + 20^2) = 28.2843; twice it is sqrt(1600) = 40, and 28.2843 / 40 / 40 = 0.01768",
    why="Tied weights, or two groups of an optimizer, put one tensor into a list twice. Stock torch squares "
    "it twice and then multiplies it by the coefficient twice, so the step almost vanishes. A list of "
    "parameters has to be cleared of repetitions by identity first.",
    ranks=(1,),
)


def right() -> dict[str, float]:
    from hyper_parallel import clip_grad_norm_

    return _listed_twice(clip_grad_norm_)


def wrong() -> dict[str, float]:
    import torch

    return _listed_twice(torch.nn.utils.clip_grad_norm_)


def _listed_twice(clip: Any) -> dict[str, float]:
    from hpcli.faults.parameters import plain, squares

    weight = plain([20.0, 20.0])
    norm = clip([weight, weight], 1.0).item()
    return {"norm": norm, "norm after clipping": squares([weight]) ** 0.5}


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm.arrangement import Arrangement

    scale = Arrangement.scale

    def for_each_mention(self: Arrangement, *arguments: Any, **options: Any) -> None:
        scale(self, *arguments, **options)
        scale(self, *arguments, **options)

    replace(Arrangement, "scale", for_each_mention)
