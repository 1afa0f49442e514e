"""With offload, gradients pass through a narrower dtype on their way to the host."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="offload changes bits of the update",
    source="torchtitan#1168",
    rule="offload changes where things live, never a bit of a loss or a norm",
    layout="fsdp{ranks}-offload",
    cause="offload-changes-bits",
)
ENTRY = Entry(
    id="torchtitan-1168",
    title=FAULT.title,
    kind="offload",
    source=FAULT.source,
    condition="a decoder on 2 CPU ranks, 2 steps with offload and 2 without; on the faulty side offloaded "
    "gradients pass through bfloat16",
    shown_by="planted",
    wrong={"losses": "of other bits", "weights": "of other bits"},
    right={"losses": "of the same bits", "weights": "of the same bits"},
    how_we_know="both runs are made and compared bit for bit; on one kind of processor the same sums give "
    "the same bits",
    why="Offload streams gradients to the host, and a narrower dtype halves what is copied. Nothing fails, "
    "and the loss curve looks the same. Offload is about where things live, so not a bit may change, and "
    "check-norm compares both runs on every layout.",
    seconds=1.0,
)


def right() -> dict[str, str]:
    away, here = (_two_steps(offload) for offload in (True, False))
    return {
        name: "of the same bits" if a == b else "of other bits"
        for name, a, b in zip(("losses", "weights"), away, here, strict=True)
    }


def _two_steps(offload: bool) -> tuple[list[float], list[list[float]]]:
    from hpcli.faults.training import Trained

    trained = Trained(model={"preset": "decoder-tiny", "num_layers": 1}, fsdp_config={"enable_offload": offload})
    trained.update()
    trained.accumulate(2)
    trained.update()
    trained.accumulate(3)
    return trained.losses, [parameter.to_local().flatten().tolist() for parameter in trained.parameters]


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
