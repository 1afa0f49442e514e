"""Expert parallelism: the experts of a layer are spread over the ``ep`` axis, tokens travel to them and back
(Lepikhin et al., "GShard", 2020).

``ep`` is carved out of the data-parallel ranks: ``dp_shard`` is ``dpm`` times ``ep``. An expert is sharded by FSDP over the
``dpm`` ranks that hold it, so what it learns from all tokens of the batch is added up by the two together and needs no
factor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from hyper_parallel.core.mesh import CONFIG_KEYS, LayoutError, LayoutProblem, ParallelMesh, check_divisible
from hyper_parallel.core.plan import ParallelPlan, matching
from hyper_parallel.platform.torch.local_compute import compute_on_local_parameters
from hyper_parallel.platform.torch.mesh import data_parallel_mesh, device_mesh, expert_mesh

Compute = Callable[[torch.Tensor, list[int]], torch.Tensor]


class ExpertDispatch:
    """Sorts rows by expert, computes them where their expert is, and puts the results back in order.

    It waits for the device once in a forward pass, for the counts by which rows are sent.

    Args:
        experts: how many there are on all ranks together.
        group: the ranks that share them, each with an equal, consecutive part; None where this rank has all.

    Attributes:
        counts: of the last forward pass, the rows that each expert of this rank had.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup | None = None) -> None:
        self.experts = experts
        self.group = group
        self.counts: list[int] = []

    def __call__(self, rows_MD: torch.Tensor, expert_M: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Apply each row's expert to it. With a group it is collective: every rank must call it, also one without rows.

        Args:
            rows_MD: (rows, hidden size).
            expert_M: the expert of each row, int64.
            compute: takes the rows of this rank's experts, sorted by expert, and how many each has.

        Returns:
            (rows, hidden size), in the order of ``rows_MD``. Where the same rows come, the same sums are made in the same order.
        """
        sorted_M, order_M = expert_M.sort(stable=True)
        experts = torch.arange(self.experts, device=expert_M.device)
        # what bincount counts, but bincount makes the host wait for the largest value
        counts_E = torch.searchsorted(sorted_M, experts, right=True) - torch.searchsorted(sorted_M, experts)
        sorted_MD = rows_MD[order_M]
        if self.group is None:
            self.counts = self.on_host(counts_E)
            out_MD = compute(sorted_MD, self.counts)
        else:
            out_MD = self._elsewhere(sorted_MD, counts_E, compute, self.group)
        back_M = torch.empty_like(order_M)
        back_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        return out_MD[back_M]

    @staticmethod
    def on_host(counts: torch.Tensor) -> Any:
        """Counts as numbers. Where tensors hold none (a plan's fake ones), replace this with an assumption."""
        return counts.tolist()

    def _elsewhere(
        self, rows_MD: torch.Tensor, counts_E: torch.Tensor, compute: Compute, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ranks = dist.get_world_size(group)
        here = self.experts // ranks
        arriving_E = torch.empty_like(counts_E)  # from each rank in turn, rows for each of the experts here
        dist.all_to_all_single(arriving_E, counts_E, group=group)
        leaving, arriving = self.on_host(torch.stack((counts_E, arriving_E)))
        sent, received = ([sum(c[i : i + here]) for i in range(0, len(c), here)] for c in (leaving, arriving))
        rows_MD = all_to_all_single_autograd(rows_MD, received, sent, group)
        rows_MD, sizes = _regrouped(rows_MD, arriving, here)  # from rank by rank to expert by expert
        self.counts = [sum(sizes[i : i + ranks]) for i in range(0, len(sizes), ranks)]
        out_MD, _ = _regrouped(compute(rows_MD, self.counts), sizes, ranks)
        return all_to_all_single_autograd(out_MD, sent, received, group)


def _regrouped(rows_MD: torch.Tensor, sizes: list[int], inner: int) -> tuple[torch.Tensor, list[int]]:
    """Blocks of rows in the order (outer, inner), ``inner`` of them in each outer one, brought into the order (inner, outer)."""
    order = [index for first in range(inner) for index in range(first, len(sizes), inner)]
    blocks = rows_MD.split(sizes)
    return torch.cat([blocks[index] for index in order]), [sizes[index] for index in order]


def apply_expert_parallel(
    model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, device_type: str | None = None
) -> list[nn.Module]:
    """Leave on each rank its part of every layer's experts, in place; all ranks must hold the same values before.

    Each module that ``plan.experts`` names must send its rows through an attribute ``dispatch`` (:class:`ExpertDispatch`).

    Returns:
        These modules, in forward order.

    Raises:
        LayoutError: a parameter's dimension that ``mesh`` would cut unevenly.
        ValueError: with tensor parallelism, a parameter that ``plan.tensor_split`` leaves out.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in plan.experts)
    ]
    problems = [problem for name, module in found for problem in _uneven(module, name, mesh, plan)]
    if problems:
        raise LayoutError(problems)
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


def _uneven(module: nn.Module, prefix: str, mesh: ParallelMesh, plan: ParallelPlan) -> Iterator[LayoutProblem]:
    for name, parameter in module.named_parameters(prefix, recurse=False):
        tensor_dim, shard_dim = plan.tensor_dim(name), matching(plan.expert_shard_dims, name)
        if mesh.tp > 1 and tensor_dim is None:
            raise ValueError(f"{name} holds experts, and tensor_split does not say which dimension tensor_parallel cuts")
        for dim, axis, ranks in (
            (0, CONFIG_KEYS["ep"], mesh.ep),
            (tensor_dim, CONFIG_KEYS["tp"], mesh.tp),
            (shard_dim, "data_parallel_shard / expert_parallel", mesh.dp_shard // mesh.ep),
        ):
            if dim is not None and (problem := check_divisible(f"{name}, dim {dim}", parameter.shape[dim], axis, ranks)):
                yield problem


def _distribute(module: nn.Module, prefix: str, lies_on: DeviceMesh, axes: list[str], plan: ParallelPlan) -> None:
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        dims = {"ep": 0, "tp": plan.tensor_dim(f"{prefix}.{name}")}
        placements: list[Placement] = [Shard(dim) for axis in axes if (dim := dims[axis]) is not None]
        # each rank takes its part of what all of them hold: nothing is sent
        placed = distribute_tensor(parameter.data, lies_on, placements, src_data_rank=None)
        local = placed.to_local().clone()  # not a view that keeps the whole alive
        held = DTensor.from_local(
            local, lies_on, placements, run_check=False, shape=placed.shape, stride=placed.stride()
        )
        module._parameters[name] = nn.Parameter(held, requires_grad=parameter.requires_grad)
