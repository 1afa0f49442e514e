"""Every rank clips what it holds by the norm of what it holds."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="each shard clipped by its own norm",
    source="LLaMA-Factory#10640",
    rule="one coefficient for all ranks, from the global norm",
    layout="fsdp{ranks}",
    cause="clipped-by-own-norm",
    wrong="shards with gradients 3 and 4, max_norm 1: (1, 1), of norm 1.4142",
    right="(0.6, 0.8), of norm 1",
    why="(3, 4) has norm 5: both are divided by it",
)


def patch() -> None:
    import torch

    from hyper_parallel.platform.torch import clip_grad

    clip = clip_grad._clip

    def by_own(found: Any, norm: float, max_norm: float, foreach: bool | None) -> float:
        own = torch.cat([tensor.flatten().double() for tensor in found.locals_]).norm()
        clip(found, float(own), max_norm, foreach)
        return clip_grad.clip_coefficient(norm, max_norm)

    replace(clip_grad, "_clip", by_own)
