"""Communication of MindSpore tensors: gloo over torch aliases on a CPU, HCCL through ``mindspore.mint.distributed`` on Ascend.

MindSpore has no collectives on a CPU. Torch's and MindSpore's functions have the same names and arguments (but two), so the one
module that carries them, ``_distributed()``, is all that differs. Every buffer is contiguous and passed flat: gloo compares shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import mindspore as ms

from hyper_parallel.core.flat_buffer import Slot
from hyper_parallel.platform.mindspore.tensors import empty, on_host, writable


class Group(NamedTuple):
    """Ranks that communicate with one another.

    Attributes:
        ranks: global, ascending.
        position: this rank's place among them.
        handle: the process group; None where this rank is alone.
    """

    ranks: tuple[int, ...]
    position: int
    handle: Any

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)


class Pending:
    """A transfer under way. It keeps the buffers alive until :meth:`wait`, which gives the result."""

    def __init__(self, work: Any, result: Any = None, keep: tuple[Any, ...] = ()) -> None:
        self._work = work
        self._result = result
        self._keep = keep

    def wait(self) -> Any:
        """Return when it is over, with the tensor that it filled."""
        if self._work is not None:
            self._work.wait()
        self._work, self._keep = None, ()
        return self._result


def start(
    *, init_method: str | None, rank: int, world_size: int, timeout_seconds: float | None
) -> None:
    """Start the default process group; every other one gets its time limit."""
    global _timeout
    if on_host():
        import torch.distributed as dist

        timeout = _timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    else:
        ms.mint.distributed.init_process_group("hccl", init_method=init_method, rank=rank, world_size=world_size)


def stop() -> None:
    """End the default process group."""
    _distributed().destroy_process_group()


def is_started() -> bool:
    """Whether there is a process group."""
    return bool(_distributed().is_initialized())


def rank() -> int:
    """This rank; 0 without a process group."""
    return _distributed().get_rank() if is_started() else 0


def world_size() -> int:
    """How many ranks there are; 1 without a process group."""
    return _distributed().get_world_size() if is_started() else 1


def world() -> Any:
    """What changes when another process group is started."""
    return _distributed().distributed_c10d._get_default_group() if on_host() and is_started() else is_started()


def make_group(partition: Sequence[tuple[int, ...]]) -> Group:
    """Of groups that partition the ranks, the one that this rank is in. Collective: every rank passes the same partition."""
    mine: Group | None = None
    here = rank()
    for ranks in partition:
        handle = _new_group(list(ranks)) if len(ranks) > 1 else None
        if here in ranks:
            mine = Group(tuple(ranks), ranks.index(here), handle)
    if mine is None:
        raise ValueError(f"rank {here} is in none of the groups {list(partition)}")
    return mine


def _new_group(ranks: list[int]) -> Any:
    if on_host():
        return _distributed().new_group(ranks, timeout=_timeout)
    return _distributed().new_group(ranks)


_timeout: timedelta | None = None


def barrier() -> None:
    """Wait for all ranks."""
    _distributed().barrier()


def all_reduce(buffer: ms.Tensor, group: Group, op: str = "sum") -> Pending:
    """Replace ``buffer`` by its sum ("sum") or maximum ("max") over the group."""
    if group.handle is None or not buffer.size:
        return Pending(None, buffer)
    flat = _flat(buffer)
    work = _distributed().all_reduce(flat, op=_operation(op), group=group.handle, async_op=True)
    return Pending(work, buffer, (flat,))


def all_gather(buffer: ms.Tensor, group: Group) -> Pending:
    """The ranks' buffers of n elements one after another: flat, group size times n elements."""
    if group.handle is None:
        return Pending(None, buffer.reshape(-1))
    gathered = empty((buffer.size * group.size,), buffer.dtype)
    if not buffer.size:
        return Pending(None, gathered)
    target, source = _flat(gathered), _flat(buffer)
    work = _named("all_gather_single", "all_gather_into_tensor")(target, source, group=group.handle, async_op=True)
    return Pending(work, gathered, (target, source))


def reduce_scatter(output: ms.Tensor, slot: Slot, rows: ms.Tensor, group: Group) -> Pending:
    """Add up the ranks' ``rows``; each gets the sum of the row of its own position into ``slot`` of the flat ``output``.

    Args:
        rows: (group size times slot length) elements, of ``output``'s dtype.
    """
    target = _flat(output).narrow(0, slot.offset, slot.length)
    source = _flat(rows)
    if group.handle is None:
        target.copy_(source)
        return Pending(None, output)
    if not slot.length:
        return Pending(None, output)
    work = _named("reduce_scatter_single", "reduce_scatter_tensor")(target, source, group=group.handle, async_op=True)
    return Pending(work, output, (target, source, rows))


def all_to_all(
    buffer: ms.Tensor, group: Group, received: Sequence[int], sent: Sequence[int], width: int = 1
) -> Pending:
    """Send ``sent[i]`` rows of ``width`` elements to rank i of the group and receive ``received[i]`` from it, in their order."""
    result = empty((sum(received), width), buffer.dtype)
    if group.handle is None:
        if buffer.size:
            writable(result).copy_(writable(buffer).view(result.shape))
        return Pending(None, result)
    target, source = _flat(result), _flat(buffer)
    sizes = [n * width for n in received], [n * width for n in sent]
    work = _distributed().all_to_all_single(target, source, *sizes, group=group.handle, async_op=True)
    return Pending(work, result, (target, source))


def broadcast(buffer: ms.Tensor, group: Group, position: int = 0) -> Pending:
    """Replace ``buffer`` by that of the rank at ``position`` in the group."""
    if group.handle is None or not buffer.size:
        return Pending(None, buffer)
    flat = _flat(buffer)
    work = _distributed().broadcast(flat, src=group.ranks[position], group=group.handle, async_op=True)
    return Pending(work, buffer, (flat,))


def send(tensor: ms.Tensor, group: Group, position: int, tag: int = 0) -> Pending:
    """Start sending to the rank at ``position`` in the group."""
    flat = _flat(tensor)
    work = _distributed().isend(flat, group.ranks[position], group=group.handle, tag=tag)
    return Pending(work, None, (flat, tensor))


def receive(shape: Sequence[int], dtype: object, group: Group, position: int, tag: int = 0) -> Pending:
    """Start receiving a tensor from the rank at ``position`` in the group."""
    result = empty(shape, dtype)
    flat = _flat(result)
    work = _distributed().irecv(flat, group.ranks[position], group=group.handle, tag=tag)
    return Pending(work, result, (flat,))


def receive_integers(count: int, group: Group, position: int, tag: int = 0) -> list[int]:
    """Wait for ``count`` int32 from the rank at ``position`` in the group."""
    result = ms.mint.zeros((count,), dtype=ms.int32)
    _distributed().irecv(_flat(result), group.ranks[position], group=group.handle, tag=tag).wait()
    return result.asnumpy().tolist()


def gather_numbers(numbers: Sequence[float], group: Group) -> list[list[float]]:
    """Every rank's ``numbers``, as many on each, in the order of the ranks. Their float64 bits arrive unchanged."""
    if group.handle is None:
        return [list(numbers)]
    if on_host():
        import torch

        mine = torch.tensor(list(numbers), dtype=torch.float64)
        everyone = torch.empty(group.size * len(numbers), dtype=torch.float64)
        _distributed().all_gather_single(everyone, mine, group=group.handle)
        return everyone.view(group.size, -1).tolist()
    import numpy as np

    # HCCL moves no float64: their halves go as int32
    halves = ms.Tensor(np.asarray(numbers, np.float64).view(np.int32))
    gathered = all_gather(halves, group).wait().asnumpy()
    return gathered.view(np.float64).reshape(group.size, -1).tolist()


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every rank's ``value`` in the order of the ranks."""
    if group.handle is None:
        return [value]
    everyone: list[Any] = [None] * group.size
    _distributed().all_gather_object(everyone, value, group=group.handle)
    return everyone


def _distributed() -> Any:
    if on_host():
        import torch.distributed as dist

        return dist
    return ms.mint.distributed


def _named(on_torch: str, on_mindspore: str) -> Callable[..., Any]:
    return getattr(_distributed(), on_torch if on_host() else on_mindspore)


def _operation(op: str) -> Any:
    return getattr(_distributed().ReduceOp, op.upper())


def _flat(tensor: ms.Tensor) -> Any:
    return writable(tensor).view(-1)
