"""The experts' gradients are multiplied by the size of the expert-parallel group."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="experts' gradients too large by the expert-parallel size",
    source="pytorch#160285",
    rule="an expert's gradient is the sum over the tokens of all ranks, with no factor of its own",
    layout="ep2-tp2-{ranks}-ranks",
    cause="expert-gradients-scaled",
    wrong="2 data-parallel ranks, 2 expert-parallel: twice the gradient",
    right="the gradient without expert parallelism",
    why="an expert sees the tokens of both ranks already",
)


def patch() -> None:
    from hpcli.train import torch_engine
    from hpcli.train.torch_engine import TorchEngine

    accumulate = TorchEngine.accumulate

    def scaled(self: TorchEngine, *arguments: Any, **options: Any) -> Any:
        loss = accumulate(self, *arguments, **options)
        for name, parameter in self.parameters.items():
            if ".experts." in name:
                parameter.grad.to_local().mul_(self.mesh.ep)
        return loss

    replace(torch_engine.TorchEngine, "accumulate", scaled)
