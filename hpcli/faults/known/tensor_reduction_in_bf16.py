"""The sum over tensor-parallel ranks is made in bfloat16 whatever the reduce dtype."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="tensor-parallel reduction in bfloat16",
    source="pytorch#190626",
    rule="finish_gradients adds up in float32",
    layout="tp2+sp-fsdp{half}",
    cause="tensor-reduction-rounded",
    wrong="1 + 2^-10 over two tensor-parallel ranks: 1.0",
    right="1.0009765625",
    why="bfloat16 has 8 significant bits: 1 + 2^-10 rounds to 1",
)


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
