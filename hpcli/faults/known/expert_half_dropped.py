"""Only the experts of the first expert-parallel rank count."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="half of the experts left out of the norm",
    source="Megatron-LM#6470",
    rule="experts are sharded over the ep axis: every rank of it counts its own",
    layout="ep2-tp2-{ranks}-ranks",
    cause="experts-partly-counted",
)
ENTRY = Entry(
    id="megatron-6470",
    title=FAULT.title,
    kind="ranks",
    source=FAULT.source,
    condition="2 expert-parallel ranks: one dense weight on both and an expert on each, every gradient 1",
    shown_by="planted",
    wrong=2**0.5,
    right=3**0.5,
    how_we_know="1 + 1 + 1 = 3; without the second expert 2",
    why="A filter that keeps one copy of every replicated parameter was applied to experts too. Experts "
    "under one name on two ranks are not copies: each rank of the expert-parallel axis holds others. They "
    "are sharded over that axis and count on all of it.",
)


def right() -> float:
    from torch.distributed.device_mesh import init_device_mesh

    from hpcli.faults.parameters import with_gradient
    from hyper_parallel import clip_grad_norm_

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    return clip_grad_norm_([with_gradient([1.0], mesh, "R"), with_gradient([1.0, 1.0], mesh, "S0")], 1.0).item()


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
