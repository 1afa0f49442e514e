"""Where a step's gradients lie in memory, so that a whole FSDP buffer is read and scaled in one pass.

All gradients of one FSDP2 parameter group are views of one buffer (on the compute device; offloaded gradients are
copied out one by one). Checking that this still holds costs a few hundred nanoseconds per gradient; touching each
gradient with an operation of its own costs several microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.core.norm import combine
from hyper_parallel.platform.torch.grad_norm.local import alike, norm_of_flat, norm_of_pack, packs
from hyper_parallel.platform.torch.grad_norm.partial import is_partial

_address_of = torch.Tensor.data_ptr
_size_of = torch.Tensor.numel


class LocalNorm(NamedTuple):
    """Norms of the gradient elements on this rank: of those that count here, and of all that it holds."""

    contributed: float
    held: float
    elements: int


class Buffer(NamedTuple):
    """One storage that several gradients tile.

    Attributes:
        first: position of a gradient that lies in it.
        members: picks the addresses of its non-empty gradients out of the addresses of all gradients.
        offsets: those addresses relative to the first of them, in bytes, int64.
        start: offset of the first member from the beginning of the storage, in bytes.
        gaps: element indices that belong to no gradient and must be zero (padding); None where there are none.
        counts: the gradients in it count on this rank.
    """

    first: int
    members: Any
    offsets: npt.NDArray[np.int64]
    start: int
    nbytes: int
    dtype: torch.dtype
    gaps: torch.Tensor | None
    counts: bool

    def still_there(self, locals_: Sequence[torch.Tensor], addresses: Sequence[int], *, moved: bool = True) -> bool:
        """Whether the same gradients tile one storage of the same size in the same way again. Where none has ``moved``, their
        offsets need no look."""
        base = addresses[self.first]
        if moved and list(self.members(addresses)) != (self.offsets + base).tolist():
            return False
        first = locals_[self.first]
        storage = first.untyped_storage()
        return (
            first.dtype == self.dtype
            and storage.nbytes() == self.nbytes
            and base - storage.data_ptr() == self.start
            and (self.gaps is None or not bool(self.flat(locals_)[self.gaps].any()))
        )

    def flat(self, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole storage as one flat tensor."""
        return locals_[self.first].as_strided((self.nbytes // self.dtype.itemsize,), (1,), 0)


class Pack(NamedTuple):
    """Small gradients that are read together.

    Attributes:
        members: picks them out of all gradients, as a tuple.
        counts: they count on this rank.
        elements: in all of them.
    """

    members: Any
    counts: bool
    elements: int


class Arrangement:
    """The buffers, and the gradients that lie in none of them, of one step and those like it.

    Attributes:
        single: positions of gradients in no buffer, so ordered that neighbours can be concatenated.
        partial: positions of gradients that are still to be summed over ranks: they do not count.
        elements: that count on this rank.
    """

    def __init__(
        self,
        locals_: Sequence[torch.Tensor],
        present: bytes,
        layouts: list[Any],
        buffers: list[Buffer],
        single: list[int],
        counts: list[bool],
        partial: list[int],
        tied: list[bool],
    ) -> None:
        self.present = present
        self.layouts = layouts
        self.buffers = buffers
        self.single = single
        self.counts = counts
        self.tied = tied
        self.partial = partial
        self.sizes = list(map(_size_of, locals_))
        self.float64 = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in locals_)
        self.elements = sum(size for size, counted in zip(self.sizes, counts, strict=True) if counted)
        self._addresses: list[int] | None = None
        self._sized_by_layout = not any(isinstance(layout, torch.dtype) for layout in layouts)
        self._packs = self._packed(locals_, single)
        self._scaled = [_picker([single[place] for place in group]) for group in alike([locals_[index] for index in single])]

    def holds(self, gradients: list[torch.Tensor], locals_: list[torch.Tensor], present: bytes) -> bool:
        """Whether this step's gradients lie as remembered. Reads addresses, and the padding where there is any."""
        if present != self.present or _layouts(gradients) != self.layouts:
            return False
        if not self.buffers:  # a layout gives the size of a shard, a plain tensor's dtype does not
            return self._sized_by_layout or list(map(_size_of, locals_)) == self.sizes
        addresses = list(map(_address_of, locals_))
        moved = addresses != self._addresses
        if not all(buffer.still_there(locals_, addresses, moved=moved) for buffer in self.buffers):
            return False
        self._addresses = addresses
        return True

    def measure(self, locals_: list[torch.Tensor], p: float) -> LocalNorm:
        """The norms of the elements on this rank. One pass per buffer; the other gradients are packed."""
        parts: list[tuple[bool, float]] = []
        single = self._packs
        for buffer in self.buffers:
            if buffer.gaps is not None and p == -math.inf:  # padding zeros would be the minimum
                single = self._packed(locals_, [*self.single, *buffer.members(range(len(locals_)))])
                continue
            parts.append((buffer.counts, norm_of_flat(buffer.flat(locals_), p)))
        parts += [(counted, norm_of_pack(members(locals_), p, elements)) for members, counted, elements in single]
        contributed = combine([norm for counted, norm in parts if counted], p)
        return LocalNorm(contributed, combine([norm for _, norm in parts], p), self.elements)

    def _packed(self, locals_: Sequence[torch.Tensor], single: Sequence[int]) -> list[Pack]:
        # Of replicas, one counts and another does not, and a copy that is tied to another stage counts elsewhere again. All cut
        # what they hold into the same parts in the same order, so that equal gradients give equal bits.
        result = []
        for kind in ((False, True), (False, False), (True, True), (True, False)):
            chosen = [index for index in single if (self.tied[index], self.counts[index]) == kind]
            of_kind = packs([locals_[index] for index in chosen])
            for members in of_kind:
                positions = [chosen[place] for place in members]
                result.append(Pack(_picker(positions), kind[1], sum(locals_[index].numel() for index in positions)))
        return result

    def scale(self, locals_: list[torch.Tensor], coefficient: float, *, foreach: bool = True) -> None:
        """Multiply every gradient once, in place, by ``coefficient`` in the gradient's own dtype and device."""
        for buffer in self.buffers:
            flat = buffer.flat(locals_)
            flat.mul_(_scalar_like(flat, coefficient))
        for members in self._scaled:
            tensors = members(locals_)
            if len(set(map(id, tensors))) < len(tensors):  # two parameters share one gradient
                tensors = tuple({id(tensor): tensor for tensor in tensors}.values())
            scalar = _scalar_like(tensors[0], coefficient)
            if foreach:
                torch._foreach_mul_(tensors, scalar)
            else:
                for tensor in tensors:
                    tensor.mul_(scalar)


def _picker(positions: Sequence[int]) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """What takes the tensors at ``positions`` out of a list."""
    if len(positions) == 1:
        return lambda tensors: (tensors[positions[0]],)
    return itemgetter(*positions)


def _scalar_like(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)


def local_tensors(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of each gradient. (``DTensor.to_local`` records a view for autograd, which costs 50 times more.)"""
    try:
        return [gradient._local_tensor for gradient in gradients]  # type: ignore[attr-defined]
    except AttributeError:  # plain tensors among them
        return [g._local_tensor if isinstance(g, DTensor) else g for g in gradients]


def _layouts(gradients: list[torch.Tensor]) -> list[Any]:
    """The DTensors' layouts, the dtype of a plain tensor. FSDP2 gives each gradient its parameter's own layout object, so that
    comparing two such lists mostly compares identities."""
    try:
        return [gradient._spec for gradient in gradients]  # type: ignore[attr-defined]
    except AttributeError:
        return [getattr(gradient, "_spec", gradient.dtype) for gradient in gradients]


def arrange(
    gradients: list[torch.Tensor],
    locals_: list[torch.Tensor],
    present: bytes,
    counts: list[bool],
    tied: list[bool] | None = None,
) -> Arrangement:
    """Find the buffers among ``gradients``. ``counts`` says of each whether it counts on this rank, ``tied`` whether ranks that
    its layout does not know of hold copies."""
    tied = tied or [False] * len(gradients)
    partial = [index for index, gradient in enumerate(gradients) if is_partial(gradient)]
    for index in partial:
        counts[index] = False
    by_storage: dict[int, list[int]] = {}
    for index, tensor in enumerate(locals_):
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(index)
    buffers = [b for b in (_buffer(locals_, indices, counts, tied) for indices in by_storage.values()) if b is not None]
    in_buffers = {index for buffer in buffers for index in buffer.members(range(len(locals_)))}
    empty = {index for index, tensor in enumerate(locals_) if not tensor.numel()}
    single = [index for index in range(len(locals_)) if index not in in_buffers and index not in empty]
    single.sort(key=lambda index: tuple(locals_[index].shape[1:]))  # neighbours that can be concatenated
    return Arrangement(locals_, present, _layouts(gradients), buffers, single, counts, partial, tied)


def _buffer(
    locals_: list[torch.Tensor], indices: list[int], counts: list[bool], tied: list[bool]
) -> Buffer | None:
    """The gradients at ``indices``, which share a storage, as a buffer; None unless they tile it up to zero padding."""
    first = locals_[indices[0]]
    same = len({(locals_[i].dtype, counts[i], tied[i]) for i in indices}) == 1
    if len(indices) < 2 or not same or not all(locals_[i].is_contiguous() for i in indices):
        return None
    nbytes = first.untyped_storage().nbytes()
    total = nbytes // first.element_size()
    gaps = _gaps([(int(locals_[i].storage_offset()), locals_[i].numel()) for i in indices], total)
    if gaps is None:
        return None
    members = itemgetter(*indices)
    addresses = [locals_[i].data_ptr() for i in indices]
    buffer = Buffer(
        first=indices[0],
        members=members,
        offsets=np.array(addresses, np.int64) - addresses[0],
        start=addresses[0] - first.untyped_storage().data_ptr(),
        nbytes=nbytes,
        dtype=first.dtype,
        gaps=gaps.to(first.device) if gaps.numel() else None,
        counts=counts[indices[0]],
    )
    return buffer if buffer.still_there(locals_, [tensor.data_ptr() for tensor in locals_]) else None


def _gaps(pieces: list[tuple[int, int]], total: int) -> torch.Tensor | None:
    """Indices of the elements that no piece (offset, length) covers; None if pieces overlap or cover less than half."""
    uncovered = []
    end = 0
    for offset, length in [*sorted(pieces), (total, 0)]:
        if offset < end:
            return None
        if offset > end:
            uncovered.append(torch.arange(end, offset))
        end = offset + length
    gaps = torch.cat(uncovered) if uncovered else torch.empty(0, dtype=torch.int64)
    return gaps if len(gaps) <= total // 2 else None
