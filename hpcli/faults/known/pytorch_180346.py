"""Parameters on two meshes, as dense ones and experts are, have no norm in stock torch."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises

ENTRY = Entry(
    id="pytorch-180346",
    title="no norm of parameters on two meshes",
    kind="dtensor",
    source="pytorch#180346",
    condition='a 2x2 mesh; one weight of 4 elements sharded over mesh["a"], one over mesh["b"], all '
    'gradients 1',
    shown_by="stock",
    wrong=Raises("All operands in aten.stack.default must have the same mesh", through=("torch/nn/utils/clip_grad.py:clip_grad_norm_",)),
    right=8**0.5,
    how_we_know="8 elements of 1",
    why="Stock torch stacks the norms of all gradients into one DTensor, which has one mesh. Experts are "
    "sharded over other ranks than dense weights, so every model with experts ends here. Here each rank "
    "adds up what counts on it, and only that number is exchanged.",
    ranks=(4,),
)


def right() -> float:
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_(_weights(), 1.0).item()


def wrong() -> float:
    import torch

    norm: Any = torch.nn.utils.clip_grad_norm_(_weights(), 1.0)
    return norm.full_tensor().item()


def _weights() -> list[Any]:
    import torch

    from hpcli.faults.parameters import ranks_mesh, with_gradient

    mesh = ranks_mesh(2, 2)
    return [with_gradient(torch.ones(4), mesh[axis], "S0") for axis in ("a", "b")]
