"""An embedding tied across pipeline stages is counted on both."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="tied embedding counted on both stages",
    source="Megatron-LM#7227",
    rule="a shared parameter counts on the lowest rank of its group",
    layout="pp2-fsdp{half}-tied",
    cause="tied-counted-twice",
    wrong="a tied weight with gradient (20, 20) on two stages: sqrt(1600) = 40",
    right="sqrt(800) = 28.2843",
    why="20^2 + 20^2 = 800, and both stages hold the same two elements",
)


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
