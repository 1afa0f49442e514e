"""FSDP2 refuses parameters of dimension 0."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="pytorch-132934",
    title="a 0-dim parameter cannot be sharded",
    kind="shards",
    source="pytorch#132934",
    condition="a module with a temperature torch.tensor(2.) as parameter, sharded over 2 ranks; output 3 x "
    "2, gradient 3 per rank",
    shown_by="stock",
    wrong=Raises("fully_shard doesn't support scalar parameters", "ValueError"),
    right={"output": 6.0, "norm": 6.0},
    how_we_know="the derivative of 3 t is 3 on each of two ranks, summed 6",
    why="A scalar has no dimension to shard along, and FSDP2 says so when the model is built. Left out of "
    "it by ignored_params it works, but its gradient is then no one's to reduce, and the norm is wrong. "
    "Here it is stored as one element and seen 0-dim by forward.",
)


def right() -> dict[str, float]:
    import hyper_parallel
    from hpcli.faults.parameters import ranks_mesh

    model = hyper_parallel.fully_shard(_scaled(), mesh=ranks_mesh())
    output = model(3.0)
    output.backward()
    return {"output": output.item(), "norm": hyper_parallel.clip_grad_norm_(model, 1.0).item()}


def wrong() -> float:
    from torch.distributed.fsdp import fully_shard

    from hpcli.faults.parameters import ranks_mesh

    model: Any = fully_shard(_scaled(), mesh=ranks_mesh())
    return model(3.0).item()


def _scaled() -> Any:
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: float) -> torch.Tensor:
            return self.temperature * x

    return Scaled()
