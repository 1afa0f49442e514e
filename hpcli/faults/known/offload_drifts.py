"""With offload, gradients pass through a narrower dtype on their way to the host."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="offload changes bits of the update",
    source="torchtitan#1168",
    rule="offload changes where things live, never a bit of a loss or a norm",
    layout="fsdp{ranks}-offload",
    cause="offload-changes-bits",
    wrong="weights that differ in the last bits after some steps",
    right="the run without offload, bit for bit",
    why="both runs are made and compared",
)


def patch() -> None:
    from hpcli.train.torch_engine import TorchEngine

    update, build = TorchEngine.update, TorchEngine.__init__

    def remembered(self: TorchEngine, config: Any, *arguments: Any) -> None:
        build(self, config, *arguments)
        self.__dict__["offloaded"] = config.fsdp_config.enable_offload

    def rounded(self: TorchEngine, lr: float) -> None:
        if self.__dict__["offloaded"]:
            for parameter in self.parameters.values():
                local = parameter.grad.to_local()
                local.copy_(local.bfloat16())
        update(self, lr)

    replace(TorchEngine, "__init__", remembered)
    replace(TorchEngine, "update", rounded)
