"""An embedding tied across pipeline stages is counted on both."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="tied embedding counted on both stages",
    source="Megatron-LM#7227",
    rule="a shared parameter counts on the lowest rank of its group",
    layout="pp2-fsdp{half}-tied",
    cause="tied-counted-twice",
)
ENTRY = Entry(
    id="megatron-7227",
    title=FAULT.title,
    kind="ranks",
    source=FAULT.source,
    condition="2 pipeline stages share one weight of two elements; its gradient, summed over both, is (20, "
    "20)",
    shown_by="planted",
    wrong=40.0,
    right=800**0.5,
    how_we_know="20^2 + 20^2 = 800; counted on both stages it is 1600, whose root is 40",
    why="First and last stage each hold a copy of the embedding, and after their sum both hold the whole "
    "gradient. A sum of squares over the stages meets it twice. That the two copies are one parameter can "
    "be seen in no layout, so it must be declared.",
)


def right() -> float:
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import plain

    weight = plain([10.0, 10.0])  # each stage's part of the gradient
    hyper_parallel.mark_shared(weight, dist.group.WORLD)
    hyper_parallel.finish_gradients([weight])
    return hyper_parallel.clip_grad_norm_([weight], 1.0, mesh=hyper_parallel.ParallelMesh(pp=2)).item()


def patch() -> None:
    from hyper_parallel.platform.torch.grad_norm import plan

    holding = plan.GradientPlan._holding

    def both_count(self: plan.GradientPlan, tensor: Any, known: dict[Any, Any]) -> plan.Holding:
        groups = plan.shared_groups
        replace(plan, "shared_groups", lambda tensor: ())
        try:
            return holding(self, tensor, known)
        finally:
            replace(plan, "shared_groups", groups)

    replace(plan.GradientPlan, "_holding", both_count)
