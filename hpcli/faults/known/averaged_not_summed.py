"""FSDP averages gradients whose loss is already divided by the global batch."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="gradients averaged over ranks on top of the loss's own division",
    source="torchtitan#1842",
    rule="FSDP's divide factor is 1, its reduction a sum",
    layout="fsdp{ranks}",
    cause="averaged-not-summed",
)
ENTRY = Entry(
    id="torchtitan-1842",
    title=FAULT.title,
    kind="pipeline",
    source=FAULT.source,
    condition="2 ranks, one weight, a loss that is divided by the global batch already: gradient 3 on rank "
    "0, 5 on rank 1",
    shown_by="planted",
    wrong=4.0,
    right=8.0,
    how_we_know="the gradient of a sum is the sum of the gradients: 3 + 5 = 8; FSDP2 left as it is divides "
    "by its 2 ranks",
    why="FSDP2 averages gradients over its ranks unless it is told otherwise. A loss that was divided by "
    "the tokens of all ranks is then divided once more. Adam hides it, since it does not see the size of "
    "gradients, but clipping and the printed norm do not.",
)


def right() -> float:
    import torch
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = torch.nn.Linear(1, 1, bias=False)
    hyper_parallel.fully_shard(model, mesh=ranks_mesh())
    model(torch.tensor([3.0 + 2 * dist.get_rank()])).sum().backward()
    return model.weight.grad.full_tensor().item()  # type: ignore[union-attr]


def patch() -> None:
    from torch.distributed.fsdp import FSDPModule

    def default(self: Any, *arguments: Any) -> None:
        """FSDP2 left as it is: it divides by the number of ranks."""

    replace(FSDPModule, "set_gradient_divide_factor", default)
    replace(FSDPModule, "set_force_sum_reduction_for_comms", default)
