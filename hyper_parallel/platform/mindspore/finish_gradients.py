"""The last step of backward: reductions that are still due, and gradients of parameters that other ranks hold too.

``fully_shard`` reduces over data-parallel ranks, and over tensor-parallel ones what they hold in parts. What is left are parameters tied
across pipeline stages. They are added up here, all in one all-reduce per group and in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import mindspore as ms

from hyper_parallel.core.flat_buffer import Slot, packed_layout
from hyper_parallel.core.precision import dtype_name
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.collectives import Group
from hyper_parallel.platform.mindspore.fully_shard import drain_reductions
from hyper_parallel.platform.mindspore.layout import gradient_of, note_place, place
from hyper_parallel.platform.mindspore.tensors import read_shard, writable, write_shard, zeros

Parameters: TypeAlias = "ms.nn.Cell | ms.Tensor | Iterable[Any]"

_GROUPS = "hyper_parallel_shared_groups"
_FINISHED = "hyper_parallel_finished"


class UnfinishedGradientsError(RuntimeError):
    """Gradients of shared parameters are still parts: :func:`finish_gradients` was not called after backward."""


def mark_shared(parameter: ms.Parameter, group: Group) -> None:
    """Declare that the ranks of ``group`` hold copies of one parameter, each with a part of its gradient.

    :func:`finish_gradients` adds the parts up, and the gradient norm counts the parameter once in the group. Call it after
    ``fully_shard``, on every rank of the group. A parameter may be in several groups.
    """
    groups = shared_groups(parameter)
    if group.ranks not in [known.ranks for known in groups]:
        setattr(parameter, _GROUPS, (*groups, group))


def shared_groups(parameter: Any) -> tuple[Group, ...]:
    """The groups that :func:`mark_shared` was given for ``parameter``."""
    return getattr(parameter, _GROUPS, ())


def is_finished(parameter: ms.Parameter) -> bool:
    """Whether the gradient that ``parameter`` has now went through :func:`finish_gradients`; a later backward makes a new one."""
    gradient = gradient_of(parameter)
    return gradient is None or getattr(gradient, _FINISHED, False)


def finish_gradients(parameters: Parameters, mesh: Any = None) -> None:
    """Complete the gradients after backward.

    Given cells, gradients that a unit accumulated and has not reduced yet are reduced. Then the gradients of shared parameters are
    added up in float32, one all-reduce per group of ranks; the result is the same bits on every rank of the group. A copy without
    gradient counts as zeros and gets the sum; where no copy has one, none gets one. What is complete already is left alone.

    Args:
        parameters: a cell, several, or parameters; the same on every rank of each group.
        mesh: accepted for symmetry with :func:`clip_grad_norm_`; the groups follow from the parameters.
    """
    cells = [entry for entry in as_list(parameters) if isinstance(entry, ms.nn.Cell)]
    if cells:
        drain_reductions(cells)
    by_group: dict[tuple[int, ...], tuple[Group, list[ms.Parameter]]] = {}
    listed = [parameter for parameter in listed_parameters(parameters) if parameter.requires_grad]
    for parameter in listed:
        if gradient_of(parameter) is None or not is_finished(parameter):
            for group in shared_groups(parameter):
                by_group.setdefault(group.ranks, (group, []))[1].append(parameter)
    for ranks in sorted(by_group):  # one order on all ranks: groups may overlap
        _add_up(*by_group[ranks])
    for _, members in by_group.values():
        for parameter in members:
            gradient = gradient_of(parameter)
            if gradient is not None:
                setattr(gradient, _FINISHED, True)


def as_list(parameters: Parameters) -> list[Any]:
    """A cell or tensor as a list of one; an iterable read once."""
    return [parameters] if isinstance(parameters, (ms.nn.Cell, ms.Tensor)) else list(parameters)


def listed_parameters(parameters: Parameters) -> list[ms.Tensor]:
    """The tensors of a cell, of several, of one tensor or of an iterable; each once."""
    found: dict[int, ms.Tensor] = {}
    for entry in as_list(parameters):
        for tensor in entry.get_parameters() if isinstance(entry, ms.nn.Cell) else (entry,):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _add_up(group: Group, parameters: list[ms.Parameter]) -> None:
    gradients = [gradient_of(parameter) for parameter in parameters]
    layout = packed_layout([*(p.size for p in parameters), len(parameters)], "float32")
    buffer = zeros((layout.total,), layout.dtype)
    flat = writable(buffer)
    there = layout.slots[-1].offset
    for position, (gradient, slot) in enumerate(zip(gradients, layout.slots, strict=False)):
        if gradient is not None:
            write_shard(flat, slot, gradient)
            flat.narrow(0, there + position, 1).add_(1.0)
    total = writable(collectives.all_reduce(buffer, group).wait())
    for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if float(total[there + position]):
            _set(parameter, gradient, total, layout.slots[position])


def _set(parameter: ms.Parameter, gradient: ms.Tensor | None, total: Any, slot: Slot) -> None:
    dtype = dtype_name(parameter.dtype if gradient is None else gradient.dtype)
    summed = read_shard(total, slot, parameter.shape, dtype)
    where = place(parameter)
    if where is not None:
        note_place(summed, where)
    if getattr(parameter, "main_grad", None) is not None:
        parameter.main_grad = summed
    else:
        parameter.grad = summed
