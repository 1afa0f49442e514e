"""A rank that skips a collective is not named."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, Raises

ENTRY = Entry(
    id="horovod-2107",
    title="a rank skips a collective, and the error names neither",
    kind="missing",
    source="horovod#2107",
    condition="2 ranks list different parameters: rank 1 lists one less",
    shown_by="formula",
    wrong=ByRank((Raises("imed out"), 1)),
    right=Raises("other parameters than the others. First difference at index 1", "GradientMismatchError"),
    how_we_know="rank 0 makes two all-reduces, rank 1 one; the second has no partner",
    why="One all-reduce for each parameter, and lists that differ: the ranks are parted from the first "
    "difference on. The timeout names no parameter and no rank. Here each exchange carries a fingerprint of "
    "the list, and all ranks raise alike, naming the difference.",
    alone=True,
    timeout_seconds=4.0,
    seconds=5.0,
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_listed(), 1.0).item()


def wrong() -> int:
    """How many norms this rank got."""
    from hpcli.faults.parameters import over_ranks, squares

    return len([over_ranks(squares([weight])) ** 0.5 for weight in _listed()])


def _listed() -> list[Any]:
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    mesh = ranks_mesh()
    return [with_local_gradient([1.0], mesh, "S0") for _ in range(2 - dist.get_rank())]
