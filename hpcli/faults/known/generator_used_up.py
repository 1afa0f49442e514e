"""The norm reads a generator of parameters to its end, and clipping finds nothing left."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="nothing clipped: the norm has used up the generator of parameters",
    source="torchtitan#1258",
    rule="an iterable of parameters is read once, into a list",
    layout="fsdp{ranks}",
    cause="not-clipped",
)
ENTRY = Entry(
    id="torchtitan-1258",
    title=FAULT.title,
    kind="dtensor",
    source=FAULT.source,
    condition="gradient (3, 4), max_norm 1, and a generator of parameters that is handed to the norm and "
    "then to the clip",
    shown_by="formula",
    wrong=[5.0, 3.0, 4.0],
    right=[5.0, 0.6, 0.8],
    how_we_know="(3, 4) / 5 = (0.6, 0.8); a generator gives its elements once",
    why="model.parameters() is a generator, and the norm reads it to its end. The loop that scales gets an "
    "empty one and does nothing, so that the norm is right in every log and nothing is ever clipped. An "
    "iterable must become a list before its first use.",
    ranks=(1,),
)


def right() -> list[float]:
    from hpcli.faults.parameters import plain
    from hyper_parallel import clip_grad_norm_

    weight = plain([3.0, 4.0])
    norm = clip_grad_norm_((parameter for parameter in [weight]), 1.0)
    return [norm.item(), *weight.grad.tolist()]  # type: ignore[union-attr]


def wrong() -> list[float]:
    import warnings

    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    from hpcli.faults.parameters import plain

    weight = plain([3.0, 4.0])
    parameters = (parameter for parameter in [weight])
    norm = get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says by now that it was given none
        clip_grads_with_norm_(parameters, 1.0, norm)
    return [norm.item(), *weight.grad.tolist()]  # type: ignore[union-attr]


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm.arrangement import Arrangement

    def nothing_left(self: Arrangement, locals_: Any, coefficient: float, *, foreach: bool = True) -> None:
        """All gradients were read before."""

    replace(Arrangement, "scale", nothing_left)
