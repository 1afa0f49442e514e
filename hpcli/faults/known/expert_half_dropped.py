"""Only the experts of the first expert-parallel rank count."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="half of the experts left out of the norm",
    source="Megatron-LM#6470",
    rule="experts are sharded over the ep axis: every rank of it counts its own",
    layout="ep2-tp2-{ranks}-ranks",
    cause="experts-partly-counted",
    wrong="one dense weight and two experts with unit gradients, one expert left out: sqrt(2)",
    right="sqrt(3)",
    why="1 + 1 + 1 = 3",
)


def patch() -> None:
    from torch.distributed.tensor import DTensor

    from hyper_parallel.platform.torch.grad_norm import plan

    holding = plan.GradientPlan._holding

    def first_only(self: plan.GradientPlan, tensor: Any, known: dict[Any, Any]) -> plan.Holding:
        held = holding(self, tensor, known)
        names = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
        if "ep" in names and tensor.device_mesh.get_local_rank("ep"):
            return held._replace(counts=False)
        return held

    replace(plan.GradientPlan, "_holding", first_only)
