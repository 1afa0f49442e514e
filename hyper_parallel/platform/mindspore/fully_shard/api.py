"""``fully_shard`` on MindSpore: which parameters form a unit, over which ranks they are cut, and how a cell notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.precision import MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.cells import extend
from hyper_parallel.platform.mindspore.collectives import Group
from hyper_parallel.platform.mindspore.fully_shard.param import Attribute, ShardedParam
from hyper_parallel.platform.mindspore.fully_shard.state import FullyShardState, ReductionQueue
from hyper_parallel.platform.mindspore.layout import Place, note_place, place, tensor_cut
from hyper_parallel.platform.mindspore.mesh import expert_shard_group, group

SHARD_DTYPE = "float32"
"""With a policy, shards are the float32 master weights; the all-gather casts them to ``compute_dtype``."""

_STATE = "_hyper_parallel_fully_shard_state"
_TAKEN = "hyper_parallel_taken"


def fully_shard(
    cell: ms.nn.Cell | Sequence[ms.nn.Cell],
    *,
    mesh: ParallelMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | None = None,
    comm_fusion: bool = False,
    shard_dim: Callable[[ms.Parameter], int | None] | None = None,
    experts: bool = False,
) -> Any:
    """Shard the parameters of ``cell`` (or of several cells, called one after another, as one unit) over ``mesh``, in place.

    Call it on inner cells first; what they took is not part of the outer cells' units. Every rank of the mesh must hold the same
    values. After a backward, each parameter's shard has its reduced gradient in ``grad``, added to what was there. Gradients are
    *summed* over ranks, not averaged. (``value_and_grad`` also returns them, for units of one cell that reduce in this backward.)

    Args:
        mesh: cut over ``dp_shard``; gradients are summed over ``dp_replicate`` too (HSDP), and over ``tp`` where tensor
            parallelism left parts of them.
        mp_policy: dtypes; without it, everything is in the dtypes that the parameters have, shards too.
        offload_policy: keep shards and their gradients in host memory.
        reshard_after_forward: free the whole parameters between forward and backward; ``None`` is true.
        comm_fusion: reduce-scatter a unit's gradients at once instead of one by one.
        shard_dim: the dimension to cut each parameter along; 0 without it, or where it gives None.
        experts: the parameters are those of experts that are spread over ``ep``: each is cut over the ranks that hold it.

    Returns:
        What was passed in.

    Raises:
        ValueError: no cell, or a parameter is already in another unit (tied parameters belong in one).
    """
    cells = [cell] if isinstance(cell, ms.nn.Cell) else list(cell)
    if not cells:
        raise ValueError("fully_shard was given no cell")
    shard_group = expert_shard_group(mesh) if experts else group(mesh, "dp_shard")
    dtypes = {
        "compute_dtype": mp_policy and mp_policy.compute_dtype,
        "reduce_dtype": mp_policy and mp_policy.reduce_dtype,
        "shard_dtype": mp_policy and SHARD_DTYPE,
        "storage_dtype": mp_policy and mp_policy.params_dtype,
    }
    params: list[ShardedParam] = []
    further: list[Group] = []
    for whole, attributes in _own_parameters(cells):
        dim = (shard_dim(whole) if shard_dim else None) or 0
        cut = tensor_cut(whole)
        axes = [axis for axis in ("dp_replicate", "tp") if getattr(mesh, axis) > 1 and (axis != "tp" or cut.partial)]
        further.append(group(mesh, *axes) if axes else Group((collectives.rank(),), 0, None))
        param = ShardedParam(whole, attributes, dim, shard_group, offload=offload_policy is not None, **dtypes)
        note_place(param.shard, _place(param, mesh, experts=experts))
        setattr(whole, _TAKEN, True)
        params.append(param)
    state = FullyShardState(
        cells,
        params,
        further,
        reduce_dtype=mp_policy.reduce_dtype if mp_policy else None,
        reshard_after_forward=reshard_after_forward is not False,
        comm_fusion=comm_fusion,
    )
    for part in cells:
        extend(part, _FullySharded, {_STATE: state})
    return cell


def states_of(cells: ms.nn.Cell | Iterable[ms.nn.Cell]) -> list[FullyShardState]:
    """The units inside ``cells``, inner ones and later ones first, which is about the order of backward."""
    found: dict[int, FullyShardState] = {}
    for cell in [cells] if isinstance(cells, ms.nn.Cell) else cells:
        for _, child in cell.cells_and_names():
            state = child.__dict__.get(_STATE)
            if state is not None:
                found.setdefault(id(state), state)
    return list(found.values())[::-1]


def set_requires_gradient_sync(cells: ms.nn.Cell | Iterable[ms.nn.Cell], required: bool) -> None:
    """Whether a backward reduces its gradients, or leaves them accumulated for a later one (gradient accumulation)."""
    for state in states_of(cells):
        state.requires_gradient_sync = required


def drain_reductions(cells: ms.nn.Cell | Iterable[ms.nn.Cell], *, all_units: bool = False) -> None:
    """Reduce what has accumulated in the units of ``cells``, overlapping one unit's communication with the next one's.

    Collective. Args:
        all_units: those without gradients here too, since other ranks may have some; else those with accumulated gradients.
    """
    queue = ReductionQueue()
    for state in states_of(cells):
        if all_units or state.has_unreduced():
            state.post_backward(queue)
        else:
            state.forget_whole()
    queue.drain()


class _FullySharded:
    """Mixed into the class of a sharded cell."""

    def construct(self, *arguments: Any, **options: Any) -> Any:
        """The cell's own computation, with whole parameters."""
        with self.__dict__[_STATE].unsharded(self):
            return super().construct(*arguments, **options)  # type: ignore[misc]


def _own_parameters(cells: Sequence[ms.nn.Cell]) -> list[tuple[ms.Parameter, list[Attribute]]]:
    """The parameters of ``cells`` that no unit has taken, each once, with every attribute that refers to it."""
    found: dict[int, tuple[ms.Parameter, list[Attribute]]] = {}
    seen: set[int] = set()
    for cell in cells:
        for _, child in cell.cells_and_names():
            if id(child) in seen:
                continue
            seen.add(id(child))
            for name, parameter in child._params.items():
                if parameter is None or place(parameter) is not None:
                    continue
                if getattr(parameter, _TAKEN, False):
                    raise ValueError(
                        f"{parameter.name} is tied to a parameter of a unit that was sharded before; "
                        "shard the cells that share it as one unit, or leave both to the outer one"
                    )
                found.setdefault(id(parameter), (parameter, []))[1].append(Attribute(child, name))
    return list(found.values())


def _place(param: ShardedParam, mesh: ParallelMesh, *, experts: bool) -> Place:
    here = collectives.rank()
    cut = tensor_cut(param.shard)
    stage = group(mesh, "dp_replicate", "dp_shard", "tp")
    same = ("dp_replicate",) if cut.dim is not None else ("dp_replicate", "tp")
    replicas = next(ranks for ranks in mesh.groups(*same) if here in ranks)
    over = "experts' " if experts else ""
    description = (
        f"{param.whole_shape} cut along {param.dim} over {param.shard_group.size} {over}ranks"
        f"{'' if cut.dim is None else f', along {cut.dim} over {mesh.tp} tensor-parallel ranks'} on {stage.ranks}"
    )
    return Place(stage, replicas, description, "expert" if experts else "sharded")
