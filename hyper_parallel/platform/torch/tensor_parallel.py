"""Tensor and sequence parallelism: parameters are cut over the ``tp`` axis, activations are gathered and summed at the
borders of regions (Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022).

Storage is DTensor, computation local (see :mod:`hyper_parallel.platform.torch.local_compute`). A region sees the whole
sequence and computes its part of a layer, so every gradient inside it that is not cut is a part too, on every rank.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.sharding import piece
from hyper_parallel.platform.torch.finish_gradients import mark_shared
from hyper_parallel.platform.torch.local_compute import compute_on_local_parameters
from hyper_parallel.platform.torch.mesh import device_mesh

_SEQUENCE = 1  # activations are (batch, sequence, ...)


def apply_tensor_parallel(
    model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, device_type: str | None = None
) -> None:
    """Cut the parameters of ``model`` as ``plan`` says and put the communication at the borders of its regions, in place.

    Every parameter but the experts' becomes a DTensor on the ``tp`` axis; all ranks must hold the same values before.
    """
    tp = device_mesh(mesh, device_type)["tp"]
    _distribute(model, tp, plan)
    for name, module in model.named_modules():
        entered: Placement = Replicate() if plan.sees_whole_sequence(name) else Shard(_SEQUENCE)
        if not any(fnmatchcase(f"{name}.", f"{experts}.*") for experts in plan.experts):
            compute_on_local_parameters(module)
        if any(fnmatchcase(name, pattern) for pattern in plan.regions):
            module.register_forward_pre_hook(_Gather(tp, entered))
            module.register_forward_hook(_Sum(tp, entered))
        elif name == plan.embedding:
            _look_up_own_rows(module, tp, entered)
        elif name == plan.head:
            module.register_forward_pre_hook(_Gather(tp, entered))
        if name in plan.sequence_entrances and plan.sequence_parallel:
            module.register_forward_hook(_Split(tp))


def cut_along_vocabulary(logits: torch.Tensor, mesh: ParallelMesh, vocabulary: int) -> DTensor:
    """The logits that a vocabulary-parallel head gives on each rank, (..., part of the vocabulary), as one DTensor
    (..., vocabulary), which torch's ``loss_parallel`` takes the cross entropy of without gathering it."""
    shape = torch.Size((*logits.shape[:-1], vocabulary))
    stride = torch.empty(shape, device="meta").stride()
    tp = device_mesh(mesh)["tp"]
    return DTensor.from_local(logits, tp, [Shard(logits.ndim - 1)], run_check=False, shape=shape, stride=stride)


def mark_partial_gradients(
    model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, device_type: str | None = None
) -> None:
    """Declare, after sharding, which parameters have a part of their gradient on each ``tp`` rank: those that are not cut, in
    regions always, elsewhere where the sequence is cut."""
    group = device_mesh(mesh, device_type)["tp"].get_group()
    for name, parameter in model.named_parameters():
        cut = plan.tensor_dim(name) is not None or plan.is_expert(name)
        part = plan.in_region(name) or not plan.sees_whole_sequence(name)
        if parameter.requires_grad and part and not cut:
            mark_shared(parameter, group)


def _distribute(model: nn.Module, tp: DeviceMesh, plan: ParallelPlan) -> None:
    known: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if parameter is None or plan.is_expert(full_name):
                continue
            if id(parameter) not in known:  # tied parameters stay tied
                dim = plan.tensor_dim(full_name)
                placement: Placement = Replicate() if dim is None else Shard(dim)
                # each rank copies its part of what all of them hold: nothing is sent, and the whole is let go
                cut = distribute_tensor(parameter.data, tp, [placement], src_data_rank=None)
                known[id(parameter)] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
            module._parameters[name] = known[id(parameter)]


class _Gather:
    """At the entrance of a region: the whole sequence on every rank. Backward, the ranks' gradients are added up."""

    def __init__(self, tp: DeviceMesh, entered: Placement) -> None:
        self.tp, self.entered = tp, entered

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x = DTensor.from_local(arguments[0], self.tp, [self.entered], run_check=False)
        x = x.redistribute(placements=[Replicate()])
        return (x.to_local(grad_placements=[Partial()]), *arguments[1:])


class _Sum:
    """At the exit of a region: the ranks' outputs added up, whole or this rank's share of the sequence."""

    def __init__(self, tp: DeviceMesh, left: Placement) -> None:
        self.tp, self.left = tp, left

    def __call__(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        y = DTensor.from_local(output, self.tp, [Partial()], run_check=False)
        return y.redistribute(placements=[self.left]).to_local()


class _Split:
    """This rank's share of a sequence that every rank holds whole. Backward, the shares' gradients are gathered."""

    def __init__(self, tp: DeviceMesh) -> None:
        self.tp = tp

    def __call__(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(output, self.tp, [Replicate()], run_check=False)
        return x.redistribute(placements=[Shard(_SEQUENCE)]).to_local()


def _look_up_own_rows(module: nn.Module, tp: DeviceMesh, left: Placement) -> None:
    """An embedding of which each rank holds some rows: rows of others give zeros, and the ranks' outputs are added up."""
    start, length = piece(_rows(module), tp.size(), tp.get_local_rank())
    total = _Sum(tp, left)

    def to_own_rows(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        row = arguments[0] - start
        module.__dict__["_elsewhere"] = (row < 0) | (row >= length)
        return (row.clamp(0, max(length - 1, 0)), *arguments[1:])

    def add_up(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        elsewhere = module.__dict__.pop("_elsewhere")
        return total(module, arguments, output.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    module.register_forward_pre_hook(to_own_rows)
    module.register_forward_hook(add_up)


def _rows(module: nn.Module) -> int:
    """The vocabulary of an embedding or head: of the DTensor, that is of all ranks together."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[0]
