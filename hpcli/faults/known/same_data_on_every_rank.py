"""Every data-parallel rank reads the first share of the batch."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="all ranks train on the same data",
    source="Automodel#3701",
    rule="each data-parallel rank has its own share of the global batch",
    layout="fsdp{ranks}",
    cause="same-data",
)
ENTRY = Entry(
    id="probe-same-data",
    title=FAULT.title,
    kind="resume",
    source="torch 2.13, measured",
    condition="a decoder on 2 ranks: how many of the shares of the global batch of step 1 are different",
    shown_by="planted",
    wrong=1,
    right=2,
    how_we_know="the ranks' tokens are compared, each token",
    why="A sampler that does not know of its rank gives every rank the same sequences. Loss and norm look "
    "healthy, for they are those of a smaller batch, and the ranks agree perfectly. Parity tests need "
    "different data, and check-norm refuses to pass without.",
)


def right() -> int:
    import torch.distributed as dist

    from hpcli.faults.training import Trained

    trained = Trained(model={"preset": "decoder-tiny", "num_layers": 1})
    share = trained.batches.share(1, dist.get_rank(), 2)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, share.inputs.tolist())
    return len({repr(tokens) for tokens in everyone})


def patch() -> None:
    from hpcli.data.text import TextBatches

    share = TextBatches.share

    def first(self: TextBatches, step: int, index: int, shares: int) -> Any:
        return share(self, step, 0, shares)

    replace(TextBatches, "share", first)
