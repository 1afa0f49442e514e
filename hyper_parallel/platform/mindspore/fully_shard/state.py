"""One sharded unit: its parameters are gathered for forward and again for backward, and their gradients are reduced together.

Forward: a cell's ``construct`` runs with its parameters' attributes shadowed by whole tensors, which are the outputs of a function
whose inputs are the shards. They are freed when the unit's last cell is done. What autograd saved of them is not the tensor but a
note of which one it was; the first note that backward opens gathers the unit again.

Backward: that function receives the gradients of the whole tensors. When all cells of the unit have handed in theirs,
:meth:`FullyShardState.post_backward` reduces them, or leaves that to a pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import mindspore as ms

from hyper_parallel.core.flat_buffer import packed_layout, split_by
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.autograd import Function, is_recording, no_grad, saved_tensors
from hyper_parallel.platform.mindspore.collectives import Group, Pending
from hyper_parallel.platform.mindspore.fully_shard.param import Attribute, ShardedParam
from hyper_parallel.platform.mindspore.fully_shard.param_group import AllReduceParamGroup, group_params
from hyper_parallel.platform.mindspore.offload import to_device
from hyper_parallel.platform.mindspore.tensors import copied, empty, read_whole, writable, write_shard


class ReductionQueue:
    """Reductions of several units under way, so that they overlap where the backend is asynchronous: while a unit's
    reduce-scatter runs, the unit before it is all-reduced over its further ranks."""

    def __init__(self) -> None:
        self._scattering: list[tuple[AllReduceParamGroup, list[Pending]]] = []
        self._reducing: list[tuple[AllReduceParamGroup, Pending]] = []

    def add(self, started: list[tuple[AllReduceParamGroup, list[Pending]]]) -> None:
        """Take a unit whose reduce-scatters have just been started, and move the units before it on."""
        before, self._scattering = self._scattering, started
        self._apply()
        self._all_reduce(before)

    def drain(self) -> dict[int, ms.Tensor]:
        """Wait for everything. By a parameter's id, what the last reduction gave it."""
        reduced = self._apply()
        started, self._scattering = self._scattering, []
        self._all_reduce(started)
        return reduced | self._apply()

    def _all_reduce(self, started: list[tuple[AllReduceParamGroup, list[Pending]]]) -> None:
        for group, scattering in started:
            for pending in scattering:
                pending.wait()
            self._reducing.append((group, group.start_all_reduce()))

    def _apply(self) -> dict[int, ms.Tensor]:
        reduced: dict[int, ms.Tensor] = {}
        for group, pending in self._reducing:
            pending.wait()
            reduced |= group.apply()
        self._reducing = []
        return reduced


class _Saved(NamedTuple):
    """In place of a whole parameter that autograd saved."""

    which: int


class FullyShardState:
    """The sharded parameters of one unit, and where it is between gather and reduction.

    Args:
        cells: one or several, called in this order.
        params: of these cells, without those of units inside them.
        further_ranks: for each parameter, the ranks over which its gradient is summed after the reduce-scatter.
        reduce_dtype: as the policy has it; None is each gradient's own.
        reshard_after_forward: free the whole parameters between forward and backward.
        comm_fusion: one reduce-scatter for a group of parameters instead of one each.

    Attributes:
        requires_gradient_sync: False leaves the gradients accumulated, whole and unreduced, after a backward.
    """

    def __init__(
        self,
        cells: Sequence[ms.nn.Cell],
        params: Sequence[ShardedParam],
        further_ranks: Sequence[Group],
        *,
        reduce_dtype: object | None,
        reshard_after_forward: bool,
        comm_fusion: bool,
    ) -> None:
        self.cells = tuple(cells)
        self.params = tuple(params)
        self.reshard_after_forward = reshard_after_forward
        self.comm_fusion = comm_fusion
        self.requires_gradient_sync = True
        self._reduce_dtype = reduce_dtype
        self._further_ranks = tuple(further_ranks)
        self._groups: dict[tuple[bool, ...], list[AllReduceParamGroup]] = {}
        self._parts = {id(cell): self._part_of(cell) for cell in self.cells}
        self._whole: list[ms.Tensor] | None = None  # in forward
        self._whole_again: list[ms.Tensor] | None = None  # in backward
        self._by_address: dict[int, int] = {}
        self._handed_in: set[int] = set()

    @property
    def groups(self) -> list[AllReduceParamGroup]:
        """The trainable parameters by how their gradients are reduced."""
        trains = tuple(param.trains for param in self.params)
        if trains not in self._groups:
            chosen = [pair for pair, wanted in zip(zip(self.params, self._further_ranks, strict=True), trains, strict=True) if wanted]
            self._groups[trains] = group_params([p for p, _ in chosen], [g for _, g in chosen], self._reduce_dtype)
        return self._groups[trains]

    @contextmanager
    def unsharded(self, cell: ms.nn.Cell) -> Iterator[None]:
        """While ``cell`` computes: its parameters are whole."""
        if cell is self.cells[0] or self._whole is None:
            self._whole = self._gather()
        part = self._parts[id(cell)]
        recording = is_recording()
        used = self._recorded(cell, part, self._whole) if recording else {i: self._whole[i] for i in part}
        with ExitStack() as stack:
            for index, tensor in used.items():
                for attribute in self.params[index].attributes:
                    stack.enter_context(_shadowed(attribute, tensor))
            if recording and self.reshard_after_forward:
                self._by_address = {tensor.data_ptr(): index for index, tensor in used.items() if tensor.size}
                stack.enter_context(saved_tensors(self._pack, self._unpack))
            try:
                yield
            finally:
                self._by_address = {}
                if cell is self.cells[-1]:
                    self._whole = None

    def post_backward(self, queue: ReductionQueue | None = None) -> dict[int, ms.Tensor]:
        """Reduce the gradients that have accumulated, over all ranks that have a part of them.

        Collective over those ranks, whichever parameters took part here.

        Args:
            queue: takes the reduction and finishes it later; without it, it is finished here.

        Returns:
            By a parameter's id, its reduced gradient; empty with ``queue``.
        """
        self.forget_whole()
        own = queue or ReductionQueue()
        self._issue_reduce_scatter_for_current_module(own)
        return own.drain() if queue is None else {}

    def has_unreduced(self) -> bool:
        """Whether gradients are accumulated that no reduction has taken yet."""
        return any(param.accumulated is not None for param in self.params)

    def forget_whole(self) -> None:
        """Free whole parameters and what is left of an unfinished backward."""
        self._whole = self._whole_again = None
        self._handed_in.clear()

    def _issue_reduce_scatter_for_current_module(self, queue: ReductionQueue) -> None:
        queue.add([(group, group.start_reduce_scatter(comm_fusion=self.comm_fusion)) for group in self.groups])

    def _hand_in(self, cell_id: int, gradients: dict[int, ms.Tensor]) -> dict[int, ms.Tensor]:
        """Accumulate the gradients of a cell's whole parameters; with the last cell's, reduce, where that is wanted now."""
        for index, gradient in gradients.items():
            self.params[index].accumulate(gradient)
        self._handed_in.add(cell_id)
        complete = all(
            id(cell) in self._handed_in or not any(self.params[i].trains for i in self._parts[id(cell)]) for cell in self.cells
        )
        if not complete:
            return {}
        if self.requires_gradient_sync:
            return self.post_backward()
        self.forget_whole()
        return {}

    def _recorded(self, cell: ms.nn.Cell, part: Sequence[int], whole: Sequence[ms.Tensor]) -> dict[int, ms.Tensor]:
        """The cell's whole parameters as autograd sees them: functions of their shards."""
        trained = [i for i in part if self.params[i].trains]
        used = {i: whole[i] for i in part}
        if trained:
            shards = [self.params[i].shard for i in trained]
            outputs = _Unshard.apply((self, id(cell), trained, [self._own(cell, i, whole[i]) for i in trained]), *shards)
            used |= dict(zip(trained, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
        return used

    def _own(self, cell: ms.nn.Cell, index: int, whole: ms.Tensor) -> ms.Tensor:
        """A tensor can be an output of one function only: further cells with a tied parameter get a copy."""
        holders = [c for c in self.cells if index in self._parts[id(c)]]
        return whole if cell is holders[0] else copied(whole)

    def _gather(self) -> list[ms.Tensor]:
        """All parameters, whole, in their compute dtype; one all-gather for each dtype."""
        wholes: list[Any] = [None] * len(self.params)
        by_dtype = split_by((param.compute_dtype, index) for index, param in enumerate(self.params))
        with no_grad():
            for dtype, indices in by_dtype.items():
                members = [self.params[i] for i in indices]
                layout = packed_layout([param.slot_length for param in members], dtype)
                local = empty((layout.total,), dtype)
                flat = writable(local)
                for param, slot in zip(members, layout.slots, strict=True):
                    write_shard(flat, slot, to_device(param.shard) if param.offload else param.shard)
                group = members[0].shard_group
                rows = writable(collectives.all_gather(local, group).wait()).view(group.size, layout.total)
                for index, param, slot in zip(indices, members, layout.slots, strict=True):
                    whole = read_whole(rows, slot, param.cut_shape, param.dim, dtype)
                    wholes[index] = whole if param.whole_shape else whole.reshape(())
        return wholes

    def _pack(self, tensor: ms.Tensor) -> Any:
        index = self._by_address.get(tensor.data_ptr()) if tensor.size else None
        if index is not None and tuple(tensor.shape) == self.params[index].whole_shape:
            return _Saved(index)
        return tensor

    def _unpack(self, packed: Any) -> ms.Tensor:
        if not isinstance(packed, _Saved):
            return packed
        if self._whole_again is None:
            _free_frozen_unit(self)
            self._whole_again = self._gather()
        return self._whole_again[packed.which]

    def _part_of(self, cell: ms.nn.Cell) -> tuple[int, ...]:
        inside = {id(child) for _, child in cell.cells_and_names()}
        return tuple(i for i, p in enumerate(self.params) if any(id(a.cell) in inside for a in p.attributes))


class _Unshard(Function):
    """Whole parameters as a function of this rank's shards. Its derivative is the reduction of gradients."""

    @staticmethod
    def forward(ctx: Any, unit: tuple[FullyShardState, int, list[int], list[ms.Tensor]], *shards: ms.Parameter) -> Any:
        ctx.state, ctx.cell_id, ctx.indices, wholes = unit
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: ms.Tensor) -> Any:
        state: FullyShardState = ctx.state
        with no_grad():
            reduced = state._hand_in(ctx.cell_id, dict(zip(ctx.indices, gradients, strict=True)))
        return (None, *(reduced.get(id(state.params[i])) for i in ctx.indices))


_latest_frozen: FullyShardState | None = None


def _free_frozen_unit(state: FullyShardState) -> None:
    """No gradient tells when a unit without trainable parameters is done with: it is when another one is gathered."""
    global _latest_frozen
    if _latest_frozen is not None and _latest_frozen is not state:
        _latest_frozen.forget_whole()
    _latest_frozen = None if any(param.trains for param in state.params) else state


@contextmanager
def _shadowed(attribute: Attribute, tensor: ms.Tensor) -> Iterator[None]:
    """``cell.name`` is ``tensor``: a cell looks among its parameters only for what it does not find as an ordinary attribute."""
    own = attribute.cell.__dict__
    before = own.get(attribute.name)
    own[attribute.name] = tensor
    try:
        yield
    finally:
        if before is None:
            del own[attribute.name]
        else:
            own[attribute.name] = before
