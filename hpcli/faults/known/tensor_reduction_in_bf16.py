"""The sum over tensor-parallel ranks is made in bfloat16 whatever the reduce dtype."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="tensor-parallel reduction in bfloat16",
    source="pytorch#190626",
    rule="finish_gradients adds up in float32",
    layout="tp2+sp-fsdp{half}",
    cause="tensor-reduction-rounded",
)
ENTRY = Entry(
    id="pytorch-190626",
    title=FAULT.title,
    kind="reduce",
    source=FAULT.source,
    condition="a norm weight replicated over 2 tensor-parallel ranks with parts 1 and 2^-10 of its gradient",
    shown_by="stock",
    wrong=1.0,
    right=1.0009765625,
    how_we_know="1 + 2^-10 needs 11 significant bits: float32 holds it exactly, bfloat16, which has 8, "
    "rounds it to 1",
    why="reduce_dtype governs FSDP's reduction over data-parallel ranks. Where that group has one rank, or "
    "the parameter is replicated over tensor-parallel ranks, another reduction is what counts, and it ran "
    "in the gradient's bfloat16. Here finish_gradients makes it, always in float32.",
)


def right() -> float:
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import plain

    weight = plain([1.0 if dist.get_rank() == 0 else 2.0**-10])
    hyper_parallel.mark_shared(weight, dist.group.WORLD)
    hyper_parallel.finish_gradients([weight])
    return weight.grad.item()  # type: ignore[union-attr]


def wrong() -> float:
    """Sequence parallelism over 2 ranks and FSDP2 over 1, both stock torch's, with reduce_dtype float32."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model: Any = torch.nn.Sequential(torch.nn.RMSNorm(1))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    part = 1.0 if dist.get_rank() == 0 else 2.0**-10
    (model(torch.ones(1, 1, 1)) * part).sum().backward()
    return model[0].weight.grad.full_tensor().item()


def patch() -> None:
    import torch
    import torch.distributed as dist

    from hyper_parallel.platform.torch import finish_gradients

    class Rounding:
        """torch.distributed whose all-reduce rounds."""

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, tensor: torch.Tensor, **options: Any) -> None:
            rounded = tensor.bfloat16()
            dist.all_reduce(rounded, **options)
            tensor.copy_(rounded)

    replace(finish_gradients, "dist", Rounding())
