"""The experts' gradients are multiplied by the size of the expert-parallel group."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="experts' gradients too large by the expert-parallel size",
    source="pytorch#160285",
    rule="an expert's gradient is the sum over the tokens of all ranks, with no factor of its own",
    layout="ep2-tp2-{ranks}-ranks",
    cause="expert-gradients-scaled",
)
ENTRY = Entry(
    id="pytorch-160285",
    title=FAULT.title,
    kind="ranks",
    source=FAULT.source,
    condition="a model with experts, one step on 2 ranks with expert_parallel 2 and without: the norm of "
    "all experts' gradients, as a ratio",
    shown_by="planted",
    wrong=2.0,
    right=1.0,
    how_we_know="the same batch and the same weights have the same gradient wherever the experts live; the "
    "factor was the ep size, 2",
    why="An expert sees the tokens of all ranks, so its gradient is a sum over them already. It was divided "
    "by the size of another group than that of the ranks whose tokens it had. A loss that is divided by the "
    "global batch needs no factor of an expert's own.",
    tolerance=1e-5,
    seconds=1.0,
)


def right() -> float:
    return _norm_of_experts(2) / _norm_of_experts(1)


def _norm_of_experts(expert_parallel: int) -> float:
    from hpcli.faults.training import Trained
    from hyper_parallel import get_total_norm

    model = {"preset": "moe-tiny", "num_layers": 2}
    trained = Trained(model=model, parallelism={"expert_parallel": expert_parallel})
    return get_total_norm([p.grad for name, p in trained.engine.parameters.items() if ".experts." in name]).item()


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
