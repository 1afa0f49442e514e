"""Optimizer state takes the dtype of the parameters when it is loaded."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="nanotron-245",
    title="float32 optimizer state comes back in bfloat16",
    kind="resume",
    source="nanotron#245",
    condition="a bfloat16 model whose optimizer holds 1 + 2^-10 as running mean, saved and loaded: the "
    "value and its dtype",
    shown_by="stock",
    wrong=[1.0, "torch.bfloat16"],
    right=[1.0009765625, "torch.float32"],
    how_we_know="1 + 2^-10 needs 11 significant bits, bfloat16 has 8",
    why="Optimizer.load_state_dict casts state to the dtype of the parameter it belongs to. The means and "
    "squares that were kept in float32 are rounded at each resume, and stay narrow. Here the state belongs "
    "to float32 master weights, and a checkpoint gives back its bits.",
    ranks=(1,),
)


def right() -> list[Any]:
    import tempfile
    from pathlib import Path

    from hpcli.faults.training import Trained

    sections: dict[str, Any] = {
        "model": {"preset": "decoder-tiny", "num_layers": 1},
        "training": {"params_dtype": "bfloat16", "compute_dtype": "bfloat16"},
    }
    saved, loaded = Trained(**sections), Trained(**sections)
    for trained in (saved, loaded):
        trained.update()
    state = saved.engine.optimizer.state()["exp_avg.norm.weight"]
    state.fill_(1 + 2.0**-10)
    with tempfile.TemporaryDirectory() as folder:
        told = saved.engine.save(Path(folder))
        loaded.engine.load(Path(folder), told)
    back = loaded.engine.optimizer.state()["exp_avg.norm.weight"]
    return [back.flatten()[0].item(), str(back.dtype)]


def wrong() -> list[Any]:
    import torch

    saved, loaded = (_optimizer() for _ in range(2))
    kept = saved.state_dict()
    kept["state"][0]["exp_avg"] = torch.full((1,), 1 + 2.0**-10)  # float32, as a careful optimizer keeps it
    loaded.load_state_dict(kept)
    back = loaded.state_dict()["state"][0]["exp_avg"]
    return [back.item(), str(back.dtype)]


def _optimizer() -> Any:
    import torch

    from hpcli.faults.parameters import plain

    weight = plain([1.0], torch.bfloat16)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    return optimizer
