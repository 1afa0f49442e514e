"""A run goes on from its weights alone."""

from __future__ import annotations

import shutil

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="automodel-3427",
    title="resumed from the weights, without the optimizer's state",
    kind="resume",
    source="Automodel#3427",
    condition="a decoder on 2 ranks, saved after step 1, resumed, step 2: losses and weights beside those "
    "of the run that went on",
    shown_by="formula",
    wrong={"loss of step 2": "of the same bits", "weights after it": "of other bits"},
    right={"loss of step 2": "of the same bits", "weights after it": "of the same bits"},
    how_we_know="the uninterrupted run is made too, and compared bit for bit",
    why="The loss of the first step after a resume depends on the weights only, so a threshold on losses "
    "sees nothing. Without its running means and its count of steps Adam then moves elsewhere. State must "
    "be compared before the first update, bit for bit, and not losses after it.",
    seconds=1.5,
)


def right() -> dict[str, str]:
    return _resumed(with_optimizer=True)


def wrong() -> dict[str, str]:
    return _resumed(with_optimizer=False)


def _resumed(with_optimizer: bool) -> dict[str, str]:
    import tempfile
    from pathlib import Path

    import torch.distributed as dist

    from hpcli.faults.training import Trained

    model = {"preset": "decoder-tiny", "num_layers": 1}
    on, again = Trained(model=model), Trained(model=model)
    on.update()
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths, 0)
    told = on.engine.save(Path(paths[0]))
    if with_optimizer:
        again.engine.load(Path(paths[0]), told)
    else:
        for parameter, saved in zip(again.parameters, on.parameters, strict=True):
            parameter.data.copy_(saved.data)
    again.engine.zero_grad()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(paths[0])
    for trained in (on, again):
        trained.accumulate(2)
        trained.update()
    same = {
        "loss of step 2": on.losses[-1] == again.losses[-1],
        "weights after it": all(a.to_local().equal(b.to_local()) for a, b in zip(on.parameters, again.parameters, strict=True)),
    }
    return {name: "of the same bits" if equal else "of other bits" for name, equal in same.items()}
