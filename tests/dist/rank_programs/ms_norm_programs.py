"""Rank programs in MindSpore: gradients that are known by hand, and the norm that every rank is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def _weights(shapes: Sequence[Sequence[int]], mesh: Any, tensor_cut: Any = None, **options: Any) -> Any:
    """Sharded parameters whose gradients, summed over the data-parallel ranks, are 1, 2, 3, ... counted through all of them."""
    import mindspore as ms
    from mindspore import nn

    from hyper_parallel.platform.mindspore.fully_shard import fully_shard
    from hyper_parallel.platform.mindspore.layout import note_tensor_cut

    class Weights(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.names = [f"weight{index}" for index in range(len(shapes))]
            for name, shape in zip(self.names, shapes, strict=True):
                setattr(self, name, ms.Parameter(ms.Tensor(np.zeros(shape, np.float32)), name=name))

        def construct(self, factor: float = 1.0) -> Any:
            loss: Any = 0.0
            start = 1
            for name in self.names:
                weight = getattr(self, name)
                values = np.arange(start, start + weight.size, dtype=np.float32).reshape(weight.shape)
                loss = loss + (weight * ms.Tensor(values * (factor / mesh.data_parallel_size))).sum()
                start += weight.size
            return loss

    model = Weights()
    if tensor_cut is not None:
        for name in model.names:
            note_tensor_cut(getattr(model, name), tensor_cut)
    return fully_shard(model, mesh=mesh, **options)


def _backward(model: Any, factor: float = 1.0) -> None:
    from hyper_parallel.platform.mindspore import autograd

    with autograd.recording():
        loss = model(factor)
    autograd.backward(loss, None, list(model.get_parameters()))


def _told(report: Any) -> dict[str, Any]:
    return {
        "norm": float(report.norm),
        "bits": report.norm.asnumpy().tobytes(),
        "dtype": str(report.norm.dtype),
        "held": [part.held for part in report.parts],
        "contributed": [part.contributed for part in report.parts],
        "ranks": [part.rank for part in report.parts],
        "replicas_differ": report.replicas_differ,
        "coefficient": report.clip_coefficient,
    }


def _local(model: Any) -> list[list[float]]:
    from hyper_parallel.platform.mindspore.layout import gradient_of

    gradients = [gradient_of(parameter) for parameter in model.get_parameters()]
    return [[] if g is None else g.asnumpy().ravel().tolist() for g in gradients]


def measured(
    shapes: Sequence[Sequence[int]], mesh: dict[str, int], norm_type: Any = 2.0, tensor: str = "", offload: bool = False
) -> dict[str, Any]:
    """The norm through the public function. ``tensor``: "partial" or "cut" over the tensor-parallel ranks."""
    import hyper_parallel
    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.precision import OffloadPolicy
    from hyper_parallel.platform.mindspore.layout import TensorCut

    layout = ParallelMesh(**mesh)
    cut = {"": None, "partial": TensorCut(None, True), "cut": TensorCut(0, False)}[tensor]
    model = _weights(shapes, layout, cut, offload_policy=OffloadPolicy() if offload else None)
    _backward(model)
    report = hyper_parallel.grad_norm_report(model, 1.0, norm_type)
    again = hyper_parallel.get_total_norm([p.grad for p in model.get_parameters()], norm_type)
    return _told(report) | {"clipped": _local(model), "after": float(again)}


def many(cases: Sequence[dict[str, Any]]) -> list[Any]:
    """:func:`measured` for each case, in one set of ranks."""
    return [measured(**case) for case in cases]


def parts() -> dict[str, Any]:
    """By class and by parameter, over two replicas of two shards."""
    from hyper_parallel import ParallelMesh, grad_norm_report

    model = _weights([[3, 2], [5]], ParallelMesh(dp_replicate=2, dp_shard=2))
    _backward(model)
    report = grad_norm_report(model, per_class=True, per_parameter=True)
    return {"classes": list(map(tuple, report.classes)), "parameters": list(map(tuple, report.parameters))}


def over_a_pipeline() -> dict[str, Any]:
    """Two stages of two ranks: gradients 1, 2, 3 on the first, and 1, 2, 3, 4 on the second; then the second stage has none."""
    from hyper_parallel import ParallelMesh, clip_grad_norm_
    from hyper_parallel.platform.mindspore import collectives

    mesh = ParallelMesh(pp=2, dp_shard=2)
    stage = mesh.coordinates(collectives.rank())["pp"]
    model = _weights([[3]] if stage == 0 else [[2, 2]], mesh)
    _backward(model)
    told = {"both": float(clip_grad_norm_([model], math.inf, mesh=mesh))}
    for parameter in model.get_parameters():
        parameter.grad = parameter.grad if stage == 0 else None
    told["first"] = float(clip_grad_norm_(model, math.inf, mesh=mesh))
    told["own"] = float(clip_grad_norm_(model, math.inf))
    told["empty list on the second"] = float(clip_grad_norm_(model if stage == 0 else [], math.inf, mesh=mesh))
    return told


def tied_across_stages() -> dict[str, Any]:
    """One parameter on both stages, gradients 1 ... 4 on each before they are added up."""
    from hyper_parallel import ParallelMesh, clip_grad_norm_, finish_gradients, mark_shared
    from hyper_parallel.platform.mindspore.mesh import group

    mesh = ParallelMesh(pp=2, dp_shard=2)
    model = _weights([[4]], mesh)
    (weight,) = model.get_parameters()
    mark_shared(weight, group(mesh, "pp"))
    _backward(model)
    told: dict[str, Any] = {}
    try:
        clip_grad_norm_(model, math.inf, mesh=mesh)
    except RuntimeError as error:
        told["before"] = str(error)
    for _ in range(2):
        finish_gradients(model, mesh)
    told["gradients"] = _local(model)
    told["norm"] = float(clip_grad_norm_(model, math.inf, mesh=mesh))
    return told


def wrong_on_some_ranks(what: str) -> Any:
    """What every rank hears when rank 3 alone has something else."""
    import mindspore as ms

    from hyper_parallel import ParallelMesh, clip_grad_norm_, grad_norm_report
    from hyper_parallel.platform.mindspore import collectives

    mesh = ParallelMesh(dp_replicate=2, dp_shard=2)
    model = _weights([[4], [6]], mesh)
    _backward(model)
    parameters = list(model.get_parameters())
    odd = collectives.rank() == 3
    if odd and what == "nan":
        parameters[1].grad = ms.Tensor(np.array([1, 2, math.nan], np.float32))
    if odd and what == "integers":
        parameters[1].grad = ms.Tensor(np.array([1, 2, 3], np.int32))
    if odd and what == "list":
        parameters = parameters[:1]
    if odd and what == "missing":
        parameters[1].grad = None
    if odd and what == "differs":
        parameters[1].grad = parameters[1].grad * 2
    try:
        if what == "differs":
            return grad_norm_report(parameters).replicas_differ
        return float(clip_grad_norm_(model if what == "nan" else parameters, 1.0, error_if_nonfinite=True))
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)


def ways_to_hold_a_gradient() -> dict[str, Any]:
    """A generator, clones without a layout, main_grad, none at all, a second backward."""
    import mindspore as ms

    from hyper_parallel import ParallelMesh, clip_grad_norm_, clip_grads_with_norm_
    from hyper_parallel.platform.mindspore.layout import zero_grad

    mesh = ParallelMesh(dp_shard=2)
    model = _weights([[3, 2], [5]], mesh)
    _backward(model)
    told = {"once": float(clip_grad_norm_(model, math.inf))}
    told["generator"] = float(clip_grad_norm_((p for p in model.get_parameters()), math.inf))
    told["twice listed"] = float(clip_grad_norm_([*model.get_parameters(), *model.get_parameters()], math.inf))
    _backward(model)
    told["accumulated"] = float(clip_grad_norm_(model, math.inf))
    for parameter in model.get_parameters():
        parameter.main_grad = ms.Tensor(parameter.grad.asnumpy() / 2)
    told["main_grad"] = float(clip_grad_norm_(model, math.inf))
    clip_grads_with_norm_(model, 1.0, 2.0)
    told["scaled by half"] = float(clip_grad_norm_(model, math.inf))
    zero_grad(model)
    told["none"] = float(clip_grad_norm_(model, math.inf))
    return told
