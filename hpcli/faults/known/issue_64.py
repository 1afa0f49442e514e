"""The grouped clip path keeps the coefficient in float32, and the function returns the rank's own norm."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, Raises
from hpcli.faults.fault import replace


def _halves(ranks: int) -> list[float]:
    """Of gradients 1, 2, ... in pairs, the norm of each: what each shard of a 2 x N/2 layout holds."""
    return [((2 * k + 1) ** 2 + (2 * k + 2) ** 2) ** 0.5 for k in range(ranks // 2)]


def _local_norms(ranks: int) -> ByRank:
    error = Raises(
        "result type Float can't be cast to the desired output type Half",
        through=("hyper_parallel/platform/torch/clip_grad.py:clip_grad_norm_", "issue_64.py:_clip_grads_with_norm_"),
    )
    return ByRank(
        tuple(
            {"mixed dtypes": error, "norm on fsdp": rank + 1.0, "norm on hsdp": _halves(ranks)[rank % (ranks // 2)]}
            for rank in range(ranks)
        )
    )


def _one_norm(ranks: int) -> dict[str, Any]:
    whole = sum(k * k for k in range(1, ranks + 1)) ** 0.5
    return {"mixed dtypes": [5.0, 0.6, 0.7998046875], "norm on fsdp": whole, "norm on hsdp": whole}


ENTRY = Entry(
    id="issue-64",
    title="the clip coefficient is not cast, and the rank's own norm returned",
    kind="dtensor",
    source="hyper-parallel gitcode#64",
    condition="a float32 main_grad (3) and a float16 grad (4) on a device that refuses mixed dtypes; then a "
    "gradient 1, 2, ..., N, sharded over N ranks, and over N/2 ranks with 2 replicas",
    shown_by="planted",
    wrong=_local_norms,
    right=_one_norm,
    how_we_know="sqrt(9 + 16) = 5, so the clipped gradients are 3/5 and 4/5 = 0.8, in float16 0.7998; 1 + 4 "
    "+ ... + 64 = 204 on 8 ranks, whose root is 14.2829; a shard of one element k has norm k",
    why="The grouped path moved the coefficient to the device of a group but not to its dtype, which the "
    "fallback path did; Ascend refuses to multiply half precision by float32 in place. For finite p the "
    "function returned what the rank had before the all-reduce, so every shard printed another number: "
    "eight on fsdp8, four on hsdp2x4, each on both replicas. Here one function casts the coefficient for "
    "every path, and one all-gather gives every rank the same record of all of them.",
    ranks=(8, 4),
    seconds=2.5,
    device="sim-npu",
    strict_dtypes=True,
)


def right() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hpcli.faults.attempt import attempt

    ranks = dist.get_world_size()
    halves = torch.distributed.init_device_mesh("npu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return {
        "mixed dtypes": attempt(_clip_mixed_dtypes),
        "norm on fsdp": _norm_on(torch.distributed.init_device_mesh("npu", (ranks,), mesh_dim_names=("shard",))),
        "norm on hsdp": _norm_on(halves),
    }


def _clip_mixed_dtypes() -> list[float]:
    """The example of the report: the norm, and the clipped gradients."""
    import torch

    from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_

    wide, half = (torch.nn.Parameter(torch.zeros(1, device="npu")) for _ in range(2))
    wide.main_grad = torch.tensor([3.0], device="npu")  # type: ignore[attr-defined]
    half.grad_dtype = None  # torch 2.13 would refuse a gradient of another dtype than the parameter's
    half.grad = torch.tensor([4.0], dtype=torch.float16, device="npu")
    norm = clip_grad_norm_([wide, half], max_norm=1.0)
    return [norm.item(), wide.main_grad.item(), half.grad.item()]  # type: ignore[attr-defined]


def _norm_on(mesh: Any) -> float:
    import torch
    import torch.distributed as dist

    import hyper_parallel
    from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_

    ranks = dist.get_world_size()
    model = torch.nn.Linear(1, ranks, bias=False, device="npu")
    hyper_parallel.fully_shard(model, mesh=mesh)
    factors = torch.arange(1.0, ranks + 1, device="npu")
    (model(torch.ones(1, device="npu")) * factors / ranks).sum().backward()  # the ranks' gradients are added up
    return clip_grad_norm_(model.parameters(), max_norm=1.0).item()


def patch() -> None:
    from hyper_parallel.platform.torch import clip_grad

    clipped = clip_grad._clipped

    def by_the_global_norm(plan: Any, measured: Any, tensors: Any, norm: float, *rest: Any) -> float:
        return clipped(plan, measured, tensors, measured.conclusion.norm, *rest)

    replace(clip_grad, "_clip", _clip_grads_with_norm_)
    replace(clip_grad, "_clipped", by_the_global_norm)
    replace(clip_grad, "_norm_tensor", _get_total_norm)


def _clip_grads_with_norm_(found: Any, norm: float, max_norm: float, foreach: bool | None) -> float:
    """The grouped path of the report: grouped by device and dtype, the coefficient moved to the device alone."""
    import torch

    from hyper_parallel.core.norm import clip_coefficient

    clip_coef_clamped = torch.tensor(clip_coefficient(norm, max_norm), dtype=torch.float32)
    groups: dict[Any, list[Any]] = {}
    for grad in found.locals_:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in groups.items():
        clip_coef_clamped_device = clip_coef_clamped.to(device)
        for g in grads:
            g.mul_(clip_coef_clamped_device)
    return float(clip_coef_clamped)


def _get_total_norm(measured: Any, plan: Any) -> Any:
    """What the report's function returned: ``local_combined``, this rank's part, in the place of ``total_norm``."""
    import torch
    import torch.distributed as dist

    local_combined = measured.records[measured.ranks.index(dist.get_rank())].held
    return torch.tensor(local_combined, device=measured.found.tensors[0].device)
