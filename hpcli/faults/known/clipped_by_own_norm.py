"""Every rank clips what it holds by the norm of what it holds."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="each shard clipped by its own norm",
    source="LLaMA-Factory#10640",
    rule="one coefficient for all ranks, from the global norm",
    layout="fsdp{ranks}",
    cause="clipped-by-own-norm",
)
ENTRY = Entry(
    id="llamafactory-10640",
    title=FAULT.title,
    kind="dtensor",
    source=FAULT.source,
    condition="one weight sharded over 2 ranks with gradient 3 on rank 0 and 4 on rank 1, max_norm 1",
    shown_by="planted",
    wrong=1.0,
    right=ByRank((0.6, 0.8)),
    how_we_know="(3, 4) has norm 5, and 3/5 and 4/5 have norm 1; 3/3 and 4/4 have norm 1.4142",
    why="The norm of a shard is taken for the norm of the whole, so each rank has a coefficient of its own. "
    "The clipped gradient then points elsewhere, and its norm is the root of the number of shards. One "
    "coefficient must follow from one norm, on all ranks.",
)


def right() -> float:
    import torch.distributed as dist

    from hpcli.faults.parameters import local_gradients, ranks_mesh, with_local_gradient
    from hyper_parallel import clip_grad_norm_

    weight = with_local_gradient([3.0 + dist.get_rank()], ranks_mesh(), "S0")
    clip_grad_norm_([weight], 1.0)
    return local_gradients([weight])[0][0]


def patch() -> None:
    import torch

    from hyper_parallel.platform.torch import clip_grad

    clip = clip_grad._clip

    def by_own(found: Any, norm: float, max_norm: float, foreach: bool | None) -> float:
        own = torch.cat([tensor.flatten().double() for tensor in found.locals_]).norm()
        clip(found, float(own), max_norm, foreach)
        return clip_grad.clip_coefficient(norm, max_norm)

    replace(clip_grad, "_clip", by_own)
