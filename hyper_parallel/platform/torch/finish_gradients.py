"""The last step of backward: gradients of which several ranks hold a part are added up.

FSDP2 reduces gradients over the data-parallel ranks. What is left are parameters that other ranks hold too, each with its own
part of the gradient: replicated over tensor-parallel ranks that saw different tokens or computed different heads, or tied
across pipeline stages. They are added up here, all in one all-reduce per group and in float32, whatever dtype the rest is
reduced in (in the layer, each would be an all-reduce of its own per micro-batch, in the compute dtype: pytorch#190626).

The ranks of a group learn from the all-reduce itself who has which gradient, so that what takes part follows from the layout
alone, and all of them go on alike.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from hyper_parallel.core.norm_exchange import fingerprint
from hyper_parallel.platform.torch.grad_norm.two_float import supports_float64
from hyper_parallel.platform.torch.mesh import communication_device
from hyper_parallel.platform.torch.shared import (
    gradient_of,
    has_changed,
    is_finished,
    local_of,
    mark_shared,
    note_copies,
    settle,
    shared_groups,
)

__all__ = ["finish_gradients", "mark_shared"]

Parameters: TypeAlias = torch.nn.Module | torch.Tensor | Iterable[Any]

# what a rank tells of its copy, added up into one small whole number
_HAS, _OWN, _TRAINS, _FINISHED, _PARTIAL, _CHANGED, _UNFIT = 1, 2, 4, 8, 16, 32, 64


def finish_gradients(parameters: Parameters, mesh: Any = None) -> None:
    """Complete the gradients after backward: add up those of which other ranks hold a part, in place.

    One all-reduce per group of ranks that share parameters (see :func:`mark_shared`), in float32 (float64 stays), ``main_grad``
    before ``.grad``. The result is the same bits on every rank of the group. A copy without gradient counts as zeros, and
    every trainable copy gets the sum; where no copy has a gradient, none gets one. Gradients with a Partial placement become
    Replicate. A gradient that is complete already is not added up again. Offloaded gradients travel through the device of the
    group. Since gradients are summed over ranks here and never averaged, those of experts need no factor of their own.

    Call it after the last backward of a step and before the clip, on every rank, whether it has gradients or not. Scale
    gradients before it rather than after, and clear them with ``zero_grad(set_to_none=True)``: of a complete gradient that changed
    in place, nobody can tell whether what it holds is a sum or a part. A ``main_grad`` that changed counts as a new part.

    Args:
        parameters: a module, several modules, or parameters; the same shared ones in the same order on every rank of a group.
        mesh: accepted for symmetry with :func:`clip_grad_norm_`; the groups follow from the parameters.

    Raises:
        ValueError: on every rank of a group, where they share different parameters with it; where a gradient is complete or
            Partial on some of them and not on others; where one was changed after it was complete; where one is sparse, or its
            parts combine by anything but sums and averages.
    """
    single = isinstance(parameters, (torch.Tensor, torch.nn.Module))
    entries = [parameters] if single else list(parameters)  # type: ignore[arg-type]
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        work: dict[int, _Sum] = {}
        groups = _groups(entries, work)
        for group in groups:
            _add_up(group)
        for whole in work.values():
            whole.write()
        for whole in work.values():  # when all are written: gradients that are views of one buffer have one version
            whole.settle()


class _Group(NamedTuple):
    """Ranks that add gradients up. What is ``shared`` always is; ``candidates`` where a rank says that they are Partial."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    shared: list[_Sum]
    candidates: list[_Sum]


class _Sum:
    """A parameter's gradient on its way to completion.

    Attributes:
        value: flat, in the widest dtype met; this rank's part until it is added up. None where nobody had one so far.
        changed: there is something to write back.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.size = local_of(parameter).numel() * (2 if parameter.is_complex() else 1)
        gradient = gradient_of(parameter) if parameter.requires_grad else None
        self.gradient = gradient
        self.finished = gradient is not None and is_finished(parameter)
        self.unfit = gradient is not None and (gradient.layout != torch.strided or _partial_kinds(gradient) - {"sum", "avg"})
        self.value: torch.Tensor | None = None if gradient is None or self.unfit else _flat(local_of(gradient))
        self.changed = False
        self.trained_by: list[int] = []

    def tell(self, group: dist.ProcessGroup) -> int:
        """What the other ranks must know of this copy."""
        said = _TRAINS * self.parameter.requires_grad + _HAS * (self.value is not None)
        if self.gradient is not None:
            said += _OWN + _FINISHED * self.finished + _CHANGED * has_changed(self.parameter)
            said += _UNFIT if self.unfit else _PARTIAL * (_partial_over(self.gradient, group) is not None)
        return said

    def part(self, group: dist.ProcessGroup) -> torch.Tensor | None:
        """What this copy adds to the sum."""
        operation = _partial_over(self.gradient, group)
        if self.value is None or operation != "avg":
            return self.value
        return self.value / dist.get_world_size(group)

    def write(self) -> None:
        """Put the sum in the gradient's place."""
        parameter, gradient = self.parameter, self.gradient
        if self.trained_by:
            note_copies(parameter, tuple(self.trained_by))
        if not self.changed or self.value is None or not parameter.requires_grad:
            return
        if gradient is None:
            wide = hasattr(parameter, "main_grad")
            wide = wide and not parameter.is_complex()
            gradient = torch.empty_like(parameter, dtype=self.value.dtype if wide else parameter.dtype)
            setattr(parameter, "main_grad" if wide else "grad", gradient)
        own = local_of(gradient)
        (torch.view_as_real(own) if own.is_complex() else own).copy_(self.value.view([*own.shape, *[2] * own.is_complex()]))
        _label_replicated(parameter, gradient)

    def settle(self) -> None:
        """Note that the gradient is complete as it is now."""
        if self.changed or self.finished:
            settle(self.parameter)


def _listed(entries: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of modules and the tensors among ``entries``, frozen ones too; each once."""
    found: dict[int, torch.Tensor] = {}
    for entry in entries:
        for tensor in entry.parameters() if isinstance(entry, torch.nn.Module) else (entry,):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _groups(entries: Sequence[Any], work: dict[int, _Sum]) -> list[_Group]:
    """The groups in the order in which all ranks go through them.

    Where a parameter has several, as on the axes of a mesh, each rank must have added up over one axis before the next is
    begun. Axes are known by the place among the parameter's groups, and by the distances between their ranks.
    """
    groups: dict[tuple[int, ...], _Group] = {}
    turns: dict[tuple[int, ...], int] = {}
    pairs = [(parameter, group, True) for parameter in _listed(entries) for group in shared_groups(parameter)]
    pairs += [(parameter, group, False) for parameter, group in _possibly_partial(entries)]
    seen: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for parameter, group, shared in pairs:
        ranks = tuple(dist.get_process_group_ranks(group))
        own = seen[id(parameter)]
        if ranks in own:  # marked, and replicated on that axis
            continue
        entry = groups.setdefault(ranks, _Group(group, ranks, [], []))
        (entry.shared if shared else entry.candidates).append(work.setdefault(id(parameter), _Sum(parameter)))
        turns[ranks] = max(len(own), turns.get(ranks, 0))
        own.append(ranks)
    return [groups[r] for r in sorted(groups, key=lambda r: (turns[r], [rank - r[0] for rank in r], r))]


def _possibly_partial(entries: Sequence[Any]) -> Iterator[tuple[torch.Tensor, dist.ProcessGroup]]:
    """Parameters that autograd may give a Partial gradient, and over which ranks: replicated DTensors, unless FSDP2 manages
    them, which reduces every gradient to its parameter's placements."""
    candidates: list[tuple[torch.Tensor, Any, int]] = []
    for parameter in _listed(entries):
        if isinstance(parameter, DTensor):
            placed = enumerate(parameter._spec.placements)
            mesh = parameter._spec.mesh
            candidates += [(parameter, mesh, axis) for axis, p in placed if isinstance(p, Replicate) and mesh.size(axis) > 1]
    if candidates:
        managed = _managed_by_fsdp(entries)
        yield from ((p, mesh.get_group(axis)) for p, mesh, axis in candidates if id(p) not in managed)


def _managed_by_fsdp(entries: Sequence[Any]) -> set[int]:
    if "torch.distributed.fsdp" not in sys.modules:  # importing it takes half a second
        return set()
    from torch.distributed.fsdp import FSDPModule

    modules = [module for entry in entries if isinstance(entry, torch.nn.Module) for module in entry.modules()]
    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    return {id(p.sharded_param) for state in states for g in state._fsdp_param_groups for p in g.fsdp_params}


def _add_up(over: _Group) -> None:
    """Add up what is shared over one group, and those of its candidates that some rank says are Partial."""
    group, ranks, shared, candidates = over
    _require_agreement(group, shared, candidates)
    members = [*shared, *candidates]
    told, sums = _reduce(group, shared, [member.tell(group) for member in members])
    partial = {id(m) for m, codes in zip(members, told, strict=True) if any(code & _PARTIAL for code in codes)}
    late = [member for member in candidates if id(member) in partial]
    if late:
        sums |= _reduce(group, late, [])[1]
    for member, codes in zip(members, told, strict=True):
        if any(code & (_CHANGED | _UNFIT) for code in codes):
            raise ValueError(_problem(member, ranks, codes))
        total = sums.get(id(member))
        if total is None:
            continue
        if member not in late:
            member.trained_by += [rank for rank, code in zip(ranks, codes, strict=True) if code & _TRAINS]
        kinds = {code & (_FINISHED | _PARTIAL) for code in codes if code & _OWN}
        if len(kinds) > 1:
            raise ValueError(_problem(member, ranks, codes))
        if any(code & _HAS for code in codes) and not any(kind & _FINISHED for kind in kinds):
            member.value, member.changed = total, True


def _reduce(
    group: dist.ProcessGroup, summed: list[_Sum], said: list[int]
) -> tuple[list[list[int]], dict[int, torch.Tensor]]:
    """One all-reduce: the sums of ``summed`` over the group, and what every rank ``said`` about each of its members.

    It is repeated in float64 where some rank turns out to have a float64 gradient.
    """
    size, position = dist.get_world_size(group), dist.get_rank(group)
    elements = sum(member.size for member in summed)
    device = communication_device(group)
    widest = torch.float64 if supports_float64(device) else torch.float32
    wide = (torch.float64, torch.complex128)
    dtype = widest if any(member.parameter.dtype in wide for member in summed) else torch.float32
    while True:
        buffer = torch.zeros(elements + len(said) * size + 1, dtype=dtype, device=device)
        pieces = buffer[:elements].split([member.size for member in summed]) if summed else ()
        for member, piece in zip(summed, pieces, strict=True):
            part = member.part(group)
            if part is not None:
                piece.copy_(part)
        notes = buffer[elements:-1].view(-1, size)
        notes[:, position] = torch.tensor(said, dtype=dtype)
        buffer[-1] = float(any(m.value is not None and m.value.dtype == torch.float64 for m in summed))
        dist.all_reduce(buffer, group=group)
        if dtype == widest or not buffer[-1]:
            told = [[int(code) for code in row] for row in notes.tolist()]
            met = widest if buffer[-1] else torch.float32
            return told, {id(member): piece.to(met) for member, piece in zip(summed, pieces, strict=True)}
        dtype = widest


_agreed: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()


def _require_agreement(group: dist.ProcessGroup, shared: Sequence[_Sum], candidates: Sequence[_Sum]) -> None:
    """Compare what the ranks of a group share, the first time that it is added up: else sizes would differ in the all-reduce,
    which gloo ends by an abort.

    Raises:
        ValueError: on every rank of the group, naming the first difference.
    """
    mine = [f"{kind} of {m.size} elements" for kind, ms in (("one", shared), ("one unmarked", candidates)) for m in ms]
    signature = fingerprint("\n".join([*mine, *(str(m.parameter.dtype) for m in shared)]))
    known = _agreed.setdefault(group, set())
    if signature in known:
        return
    size = dist.get_world_size(group)
    device = communication_device(group)
    everyone = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather_single(everyone, torch.tensor([signature], device=device), group=group)
    if len(set(everyone.tolist())) > 1:
        lists: list[Any] = [None] * size
        dist.all_gather_object(lists, mine, group=group)
        ranks = dist.get_process_group_ranks(group)
        told = "; ".join(f"rank {rank} shares {len(entries)}: {_shortened(entries)}" for rank, entries in zip(ranks, lists, strict=True))
        raise ValueError(
            f"ranks {tuple(ranks)} share parameters, but not the same: {told}. Call mark_shared for the same parameters on every "
            "rank of the group, and list them in one order"
        )
    known.add(signature)


def _shortened(entries: list[str]) -> str:
    return ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")


def _problem(member: _Sum, ranks: tuple[int, ...], codes: list[int]) -> str:
    what = f"the gradient of a parameter of shape {tuple(member.parameter.shape)}"
    if unfit := [rank for rank, code in zip(ranks, codes, strict=True) if code & _UNFIT]:
        return (
            f"{what} is sparse, or Partial by neither sum nor avg, on ranks {unfit}; only dense gradients, sums and averages can be "
            "finished: call .to_dense() on it, or redistribute it, before"
        )
    if changed := [rank for rank, code in zip(ranks, codes, strict=True) if code & _CHANGED]:
        return (
            f"{what} was complete and has changed since, on ranks {changed}: whether it is a sum or a part cannot be told. Call "
            "finish_gradients once, after the last backward of a step; scale gradients before it rather than after, and clear them "
            "with zero_grad(set_to_none=True)"
        )
    words = defaultdict(list)
    for rank, code in zip(ranks, codes, strict=True):
        if code & _OWN:
            words["complete" if code & _FINISHED else "Partial" if code & _PARTIAL else "a part"].append(rank)
    told = "; ".join(f"{word} on ranks {where}" for word, where in words.items())
    return (
        f"{what} is not of one kind on ranks {ranks}: {told}. "
        "Call finish_gradients once, after the last backward of a step, on all of them"
    )


def _partial_over(gradient: Any, group: dist.ProcessGroup) -> str | None:
    """The reduction that ``gradient`` still needs over ``group``: "sum" or "avg"; None where it needs none."""
    if not isinstance(gradient, DTensor):
        return None
    ranks = dist.get_process_group_ranks(group)
    for axis, placement in enumerate(gradient._spec.placements):
        if isinstance(placement, Partial) and dist.get_process_group_ranks(gradient._spec.mesh.get_group(axis)) == ranks:
            assert isinstance(placement, Partial)
            return placement.reduce_op
    return None


def _partial_kinds(gradient: Any) -> set[str]:
    placements = gradient._spec.placements if isinstance(gradient, DTensor) else ()
    return {placement.reduce_op for placement in placements if isinstance(placement, Partial)}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)


def _label_replicated(parameter: Any, gradient: Any) -> None:
    """Give the parameter its gradient with Replicate in the place of Partial."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient._spec.placements):
        return
    placements = [Replicate() if p.is_partial() else p for p in gradient._spec.placements]
    whole = DTensor.from_local(
        gradient._local_tensor,
        gradient._spec.mesh,
        placements,
        run_check=False,
        shape=gradient.shape,
        stride=gradient.stride(),
    )
    setattr(parameter, "main_grad" if getattr(parameter, "main_grad", None) is gradient else "grad", whole)
