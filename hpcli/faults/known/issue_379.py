"""With CPU offload the norm's scalar is made on the CPU, and reduced over a group that only knows the accelerator."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises
from hpcli.faults.fault import replace

_ERROR = Raises(
    "No backend type associated with device type cpu",
    through=(
        "hyper_parallel/platform/torch/clip_grad.py:clip_grad_norm_",
        "issue_379.py:_total_norm_fsdp2_aligned",
        "torch/distributed/distributed_c10d.py:all_reduce",
    ),
)
_LAYOUTS: dict[str, Any] = {
    "vlm on fsdp": {"model": {"preset": "vlm-tiny", "num_layers": 2}, "parallelism": {}},
    "moe on tp2 x ep2": {
        "model": {"preset": "moe-tiny", "num_layers": 2},
        "parallelism": {"tensor_parallel": 2, "expert_parallel": 2},
    },
}
_RIGHT = {"offload changes": "no bit", "norm over exact": 1.0}

ENTRY = Entry(
    id="issue-379",
    title="with CPU offload the norm meets a group without a CPU backend",
    kind="offload",
    source="hyper-parallel gitcode#379",
    condition="fsdp_config.enable_offload: true, a vision-language model on FSDP and experts on TP2 x EP2, "
    "process group of the accelerator's backend alone; 2 training steps with offload and 2 without",
    shown_by="planted",
    wrong={layout: _ERROR for layout in _LAYOUTS},
    right={f"{layout}: {what}": value for layout in _LAYOUTS for what, value in _RIGHT.items()},
    how_we_know="the same two steps are trained without offload, and norms and losses compared bit for "
    "bit on every rank; the exact norm is that of the gradients gathered whole, in float64",
    why="Offloaded gradients are on the CPU, so a norm that is accumulated where they are is a CPU tensor. "
    "The group's backend (hccl, nccl) is registered for the accelerator alone, and its all-reduce refuses "
    "that tensor. Here the scalar goes to the group's own device for the exchange and the result comes "
    "back, and offload changes no bit.",
    ranks=(8, 4),
    seconds=9.0,
    device="accelerator",
)


def right() -> dict[str, Any]:
    from functools import partial

    from hpcli.faults.attempt import attempts

    return attempts({layout: partial(_compared, sections) for layout, sections in _LAYOUTS.items()})


def _compared(sections: dict[str, Any]) -> dict[str, Any]:
    (away, exact), (here, _) = (_two_steps(sections, offload) for offload in (True, False))
    changed = "no bit" if away == here else f"norms and losses {away} with offload, {here} without"
    return dict(zip(_RIGHT, (changed, away[0] / exact), strict=True))


def _two_steps(sections: dict[str, Any], offload: bool) -> tuple[list[float], float]:
    """The norms and losses of two steps, and the exact norm of the first."""
    from hpcli.faults.training import Trained
    from hyper_parallel.platform.torch.clip_grad import clip_grad_norm_

    trained = Trained(**sections, fsdp_config={"enable_offload": offload})
    exact = trained.exact_norm()
    norms = [clip_grad_norm_(trained.parameters, max_norm=1.0).item()]
    trained.update()
    trained.accumulate(2)
    norms.append(clip_grad_norm_(trained.parameters, max_norm=1.0).item())
    return [*norms, *trained.losses], exact


def patch() -> None:
    from hyper_parallel.platform.torch import clip_grad

    measure = clip_grad.measure

    def measured(plan: Any, found: Any, tensors: Any, p: float) -> Any:
        norm = _total_norm_fsdp2_aligned(found.locals_, plan.scope.group, p)
        right = measure(plan, found, tensors, p)
        return right._replace(conclusion=right.conclusion._replace(norm=norm))

    replace(clip_grad, "measure", measured)


def _total_norm_fsdp2_aligned(gradients: list[Any], group: Any, p: float) -> float:
    """The function of the report: the sum of p-th powers is built where the gradients are, and reduced there."""
    import torch
    import torch.distributed as dist

    local_p = torch.stack([gradient.float().abs().pow(p).sum() for gradient in gradients]).sum()
    dist.all_reduce(local_p, op=dist.ReduceOp.SUM, group=group)
    return float(local_p) ** (1 / p)
