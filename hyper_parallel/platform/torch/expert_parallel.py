"""Expert parallelism: the experts of a layer are spread over the ``ep`` axis, tokens travel to them and back
(Lepikhin et al., "GShard", 2020).

``ep`` is carved out of the data-parallel ranks: ``dp_shard`` is ``dpm`` times ``ep``. An expert is sharded by FSDP over the
``dpm`` ranks that hold it, so what it learns from all tokens of the batch is added up by the two together and needs no
factor of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan, matching
from hyper_parallel.platform.torch.local_compute import compute_on_local_parameters
from hyper_parallel.platform.torch.mesh import data_parallel_mesh, device_mesh, expert_mesh

Compute = Callable[[torch.Tensor, list[int]], torch.Tensor]


class ExpertDispatch:
    """Sorts rows by expert, computes them where their expert is, and puts the results back in order.

    Args:
        experts: how many there are on all ranks together.
        group: the ranks that share them, each with an equal, consecutive part; None where this rank has all.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup | None = None) -> None:
        self.experts = experts
        self.group = group

    def __call__(self, rows_MD: torch.Tensor, expert_M: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Apply each row's expert to it.

        Args:
            rows_MD: (rows, hidden size).
            expert_M: the expert of each row, int64.
            compute: takes the rows of this rank's experts, sorted by expert, and how many each has.

        Returns:
            (rows, hidden size), in the order of ``rows_MD``. Where the same rows come, the same sums are made in the same order.
        """
        order_M = expert_M.argsort(stable=True)
        counts_E = torch.bincount(expert_M, minlength=self.experts)
        sorted_MD = rows_MD[order_M]
        if self.group is None:
            out_MD = compute(sorted_MD, counts_E.tolist())
        else:
            out_MD = self._elsewhere(sorted_MD, counts_E, compute, self.group)
        back_M = torch.empty_like(order_M)
        back_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        return out_MD[back_M]

    def _elsewhere(
        self, rows_MD: torch.Tensor, counts_E: torch.Tensor, compute: Compute, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ranks = dist.get_world_size(group)
        arriving_E = torch.empty_like(counts_E)  # from each rank in turn, rows for each of the experts here
        dist.all_to_all_single(arriving_E, counts_E, group=group)
        sent, received = torch.stack((counts_E, arriving_E)).view(2, ranks, -1).sum(-1).tolist()
        rows_MD = all_to_all_single_autograd(rows_MD, received, sent, group)
        here = self.experts // ranks
        expert_M = torch.arange(here, device=rows_MD.device).repeat(ranks).repeat_interleave(arriving_E)
        local = ExpertDispatch(here)
        out_MD = local(rows_MD, expert_M, compute)
        return all_to_all_single_autograd(out_MD, sent, received, group)


def apply_expert_parallel(
    model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, device_type: str | None = None
) -> list[nn.Module]:
    """Leave on each rank its part of every layer's experts, in place; all ranks must hold the same values before.

    Returns:
        The modules that hold experts, in forward order; each has an attribute ``dispatch`` (:class:`ExpertDispatch`).
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in plan.experts)
    ]
    axes = [axis for axis in ("ep", "tp") if getattr(mesh, axis) > 1]
    if axes:
        whole = _whole_mesh(mesh, device_type)
        lies_on = whole[tuple(axes)]
        for name, module in found:
            _distribute(module, name, lies_on, axes, plan)
            compute_on_local_parameters(module)
            if mesh.ep > 1:
                dispatch = module.dispatch
                assert isinstance(dispatch, ExpertDispatch)
                module.dispatch = ExpertDispatch(dispatch.experts, whole["ep"].get_group())
    return [module for _, module in found]


def expert_shard_mesh(mesh: ParallelMesh, device_type: str | None = None) -> DeviceMesh:
    """The mesh that FSDP2 shards experts over: ``dpm``, and before it ``dp_replicate`` where there are replicas."""
    if mesh.ep == 1:
        return data_parallel_mesh(mesh, device_type)
    whole = expert_mesh(mesh, device_type)
    return whole["dp_replicate", "dpm"] if mesh.dp_replicate > 1 else whole["dpm"]


def expert_shard_placement(model: nn.Module, plan: ParallelPlan) -> Callable[[nn.Parameter], Shard | None]:
    """The dimension that FSDP2 cuts each expert parameter along."""
    dims = {
        parameter: matching(plan.expert_shard_dims, name)
        for name, parameter in model.named_parameters()
        if plan.is_expert(name)
    }

    def placement(parameter: nn.Parameter) -> Shard | None:
        dim = dims.get(parameter)
        return None if dim is None else Shard(dim)

    return placement


def _whole_mesh(mesh: ParallelMesh, device_type: str | None) -> DeviceMesh:
    return expert_mesh(mesh, device_type) if mesh.ep > 1 else device_mesh(mesh, device_type)


def _distribute(module: nn.Module, prefix: str, lies_on: DeviceMesh, axes: list[str], plan: ParallelPlan) -> None:
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        cut = plan.tensor_dim(f"{prefix}.{name}")
        assert cut is not None, f"{prefix}.{name} has no dimension for tensor parallelism"
        placements: list[Placement] = [Shard(0 if axis == "ep" else cut) for axis in axes]
        # each rank takes its part of what all of them hold: nothing is sent
        placed = distribute_tensor(parameter.data, lies_on, placements, src_data_rank=None)
        local = placed.to_local().clone()  # not a view that keeps the whole alive
        held = DTensor.from_local(
            local, lies_on, placements, run_check=False, shape=placed.shape, stride=placed.stride()
        )
        module._parameters[name] = nn.Parameter(held, requires_grad=parameter.requires_grad)
