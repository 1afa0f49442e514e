"""Each pipeline stage clips with the norm of its own parameters."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="each pipeline stage clips with its own norm",
    source="torchtitan#596",
    rule="with a pipeline, the norm's scope is given by mesh=",
    layout="pp2-fsdp{half}",
    cause="stage-local-norm",
    wrong="two stages with norms 3 and 4, max_norm 1: each scaled by its own",
    right="5 on both, gradients 0.6 and 0.8",
    why="sqrt(9 + 16) = 5",
)


def patch() -> None:
    from hpcli.train.torch_engine import TorchEngine

    build = TorchEngine.__init__

    def without_scope(self: TorchEngine, *arguments: Any) -> None:
        build(self, *arguments)
        self.norm_mesh = None

    replace(TorchEngine, "__init__", without_scope)
