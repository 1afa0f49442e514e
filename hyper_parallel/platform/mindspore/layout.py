"""What a parameter on this rank is a part of. It is noted on the parameter itself, where MindSpore has no type for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms

from hyper_parallel.platform.mindspore.collectives import Group

_TENSOR_CUT = "hyper_parallel_tensor_cut"
_PLACE = "hyper_parallel_place"


class TensorCut(NamedTuple):
    """How tensor parallelism left a parameter.

    Attributes:
        dim: the dimension that it cut; None where every rank holds the whole parameter.
        partial: each rank computes a part of the gradient of what it holds whole, and the parts have to be added up.
    """

    dim: int | None = None
    partial: bool = False


class Place(NamedTuple):
    """Where a sharded parameter lies, as far as the gradient norm has to know.

    Attributes:
        stage: the ranks that hold any part or copy of it: its pipeline stage.
        replicas: those of them that hold the same part as this rank, itself included, ascending.
        description: shape and layout in words, the same on every rank that lists the same parameter.
        kind: "sharded", or "expert" where expert parallelism spread it.
    """

    stage: Group
    replicas: tuple[int, ...]
    description: str
    kind: str


def tensor_cut(parameter: ms.Parameter) -> TensorCut:
    """What :func:`note_tensor_cut` noted; a parameter without a note is whole and its gradient complete."""
    return getattr(parameter, _TENSOR_CUT, TensorCut())


def note_tensor_cut(parameter: ms.Parameter, cut: TensorCut) -> None:
    """Note how tensor parallelism left ``parameter``."""
    setattr(parameter, _TENSOR_CUT, cut)


def place(parameter: Any) -> Place | None:
    """Where a sharded parameter lies; None for any other tensor."""
    return getattr(parameter, _PLACE, None)


def note_place(parameter: ms.Tensor, where: Place) -> None:
    """Note where the sharded ``parameter``, or its gradient, lies."""
    setattr(parameter, _PLACE, where)


def gradient_of(parameter: Any) -> ms.Tensor | None:
    """``main_grad`` where a parameter has one, else ``grad``; MindSpore itself sets neither."""
    main_grad = getattr(parameter, "main_grad", None)
    return getattr(parameter, "grad", None) if main_grad is None else main_grad


def zero_grad(parameters: Any) -> None:
    """Drop the gradients that ``parameters`` (a cell, or any iterable of parameters) hold."""
    for parameter in parameters.get_parameters() if isinstance(parameters, ms.nn.Cell) else parameters:
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad = None
