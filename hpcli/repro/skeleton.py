"""The file to start from when adding a fault of one's own."""

from __future__ import annotations

import re
from pathlib import Path

from hpcli.config.errors import ConfigError, Problem
from hpcli.faults.registry import FOLDER, entries

SKELETON = '''"""What goes wrong, in one sentence."""

from __future__ import annotations

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="{id}",
    title="the ranks' norms added up",
    kind="ranks",
    source="your-project#1",
    condition="one weight, sharded over 2 ranks: gradient 3 on rank 0, 4 on rank 1",
    shown_by="formula",
    wrong=7.0,
    right=5.0,
    how_we_know="sqrt(3^2 + 4^2) = 5; the sum of the norms is 3 + 4 = 7",
    why="A norm of a whole is no sum of norms of its parts. What adds up over ranks are the p-th powers. "
    "The faulty side all-reduces the norms themselves.",
    ranks=(2,),
)


def _weight():
    """The gradient of the condition, on this rank."""
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient

    return with_local_gradient([3.0 + dist.get_rank()], ranks_mesh(), "S0")


def right() -> float:
    """What the library gives, on every rank."""
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([_weight()], 1.0).item()


def wrong() -> float:
    """What the faulty code gives, on every rank."""
    from hpcli.faults.parameters import over_ranks, squares

    return over_ranks(squares([_weight()]) ** 0.5)
'''


def write_skeleton(name: str) -> Path:
    """Write a working entry called ``name`` into the current folder.

    Raises:
        ConfigError: no name for a file, one that is taken, or a file that is there.
    """
    path = Path(f"{name.replace('-', '_')}.py")
    problem = ""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        problem = f"{name!r}: small letters, digits and dashes, such as megatron-7227"
    elif name in entries() or (FOLDER / path).exists():
        problem = f"there is an entry {name} already; hpcli repro {name} shows it"
    elif path.exists():
        problem = f"{path} is there already; choose another name, or move it"
    if problem:
        raise ConfigError([Problem("--new", None, None, "", problem)])
    path.write_text(SKELETON.format(id=name))
    return path
