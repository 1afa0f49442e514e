"""Rank programs: what tensor parallelism stores, what a module sees while it runs, and what becomes of partial gradients."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel
from hpcli.check.batch import check_batches
from hpcli.check.reference import read_reference, write_reference
from hpcli.config.schema import Config
from hpcli.models.parallel import parallel_plan
from hpcli.models.torch.build import build_model
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import MixedPrecisionPolicy, OffloadPolicy, ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.sharding import local_pieces, parameter_cuts
from hyper_parallel.platform.torch.expert_parallel import ExpertDispatch
from hyper_parallel.platform.torch.shared import shared_groups
from hyper_parallel.platform.torch.tensor_parallel import apply_tensor_parallel


class Experts(nn.Module):
    """Stacked parameters of 4 experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(4, 6, 8)), nn.Parameter(torch.zeros(4, 8, 6))
        self.dispatch = ExpertDispatch(4)


class Shapes(nn.Module):
    """Parameters cut in every way, most of them unevenly; the elements of each count from 0."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"rows": (11, 3), "few_rows": (3, 4), "columns": (5, 6), "few_columns": (2, 6), "whole": (7,), "one": (1,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.experts = Experts()
        for parameter in self.parameters():
            parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape)


# some models here have no communication of their own, and need none: they are never trained
WITHOUT_BORDERS = patch("hyper_parallel.platform.torch.parallelize.check_plan")

SHAPES_PLAN = ParallelPlan(
    layers=(),
    tensor_split={"*rows": 0, "*columns": 1, "experts.up": 1, "experts.down": 2},
    experts=("experts",),
    expert_shard_dims={"experts.up": 2, "experts.down": 1},
)


def held(mesh: dict[str, int], offload: bool = False) -> dict[str, Any]:
    """Of each parameter: the elements here, and those that ``core.sharding`` says."""
    layout, model = ParallelMesh(**mesh), Shapes()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    offload_policy = OffloadPolicy(pin_memory=False) if offload else None
    with WITHOUT_BORDERS:
        hyper_parallel.parallelize(model, layout, SHAPES_PLAN, MixedPrecisionPolicy(), offload_policy)
    told = {}
    for name, parameter in model.named_parameters():
        pieces = local_pieces(tuple(parameter.shape), parameter_cuts(SHAPES_PLAN, layout, name, dist.get_rank()))
        expected = whole[name][tuple(slice(start, start + length) for start, length in pieces)]
        told[name] = (parameter.to_local().tolist(), expected.tolist())
    return told


class Looking(nn.Module):
    """A matrix cut by rows, and a gain that is not; notes what it sees, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.gain = nn.Parameter(torch.ones(6, 2)), nn.Parameter(torch.ones(6))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        for parameter in (self.matrix, self.gain):
            self.seen.append(f"{type(parameter).__name__} {tuple(parameter.shape)}")
        if fail:
            raise KeyError("planted")
        return x * self.matrix.sum() + self.gain.sum()


class TiedLooking(nn.Module):
    """Two of them that share the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Looking(), Looking()
        self.second.matrix = self.first.matrix

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        return self.second(self.first(x), fail)


def seen_in_forward(sharded: bool, checkpointing: bool) -> dict[str, Any]:
    """What forward sees, what is there after it and after one that failed, on 2 ranks of tensor parallelism."""
    mesh, model = ParallelMesh(tp=2), TiedLooking()
    plan = ParallelPlan(
        layers=("first", "second"),
        unit="model",  # FSDP2 keeps tied only what is in one unit
        tensor_split={"*.matrix": 0},
        activation_checkpointing=checkpointing,
    )
    if sharded:
        with WITHOUT_BORDERS:
            hyper_parallel.parallelize(model, mesh, plan)
    else:
        apply_tensor_parallel(model, mesh, plan)
    model(torch.ones(2, 2)).sum().backward()
    matrix: Any = model.first.matrix
    told = {
        "seen": list(model.second.seen),
        "after": [type(parameter).__name__ for parameter in model.parameters()],
        "tied": matrix is model.second.matrix,
        "matrix bytes": matrix.to_local().untyped_storage().nbytes(),
        "gradients": [p.grad.full_tensor().flatten().tolist() for p in (matrix, model.first.gain, model.second.gain)],
    }
    try:
        model(torch.ones(2, 2), True)
    except KeyError:
        told["failed"] = True
    told["left behind"] = [
        name for looking in (model.first, model.second) for name in ("matrix", "gain") if name in looking.__dict__
    ]
    return told


def marked(config: dict[str, Any], mesh: dict[str, int]) -> list[str]:
    """The parameters whose gradient is a part on each tensor-parallel rank."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    model = build_model(settings.model, 0)
    hyper_parallel.parallelize(model, layout, parallel_plan(settings), MixedPrecisionPolicy())
    return [name for name, parameter in model.named_parameters() if shared_groups(parameter)]


class Factors(nn.Module):
    """Parameters whose gradient is the factor that ``forward`` is given, in the dtype it is computed in."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.enter = nn.Identity()  # where the sequence would be split; here each rank is told its part
        self.weights = nn.ParameterList(torch.zeros(4) for _ in range(parameters))

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([(weight * factor).sum() for weight in self.weights]).sum()


def partial_sum(mesh: dict[str, int], policy: dict[str, Any], factors: list[list[float]]) -> dict[str, Any]:
    """Gradients of parameters that every tensor-parallel rank holds: ``factors`` of each rank's micro-batches, added up."""
    layout, model = ParallelMesh(**mesh), Factors(5)
    plan = ParallelPlan(layers=(), sequence_parallel=True, sequence_entrances=("enter",))
    hyper_parallel.parallelize(model, layout, plan, MixedPrecisionPolicy(**policy))
    mine = factors[dist.get_rank()]
    for index, factor in enumerate(mine):
        model.set_requires_gradient_sync(index == len(mine) - 1)
        model(factor).backward()
    told: dict[str, Any] = {}
    for call in ("first", "second"):
        with Collectives() as counted:
            hyper_parallel.finish_gradients(model, layout)
        told[call] = sorted({value for weight in model.weights for value in weight.grad.to_local().tolist()})
        told[f"{call} call"] = dict(counted.counts)
    return told


class Entering(nn.Module):
    """An embedding that every rank holds whole, split along the sequence on leaving it, and a head of one output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 1), nn.Linear(1, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def entered() -> dict[str, Any]:
    """The sum of the outputs of tokens 0 to 3, of which each of two ranks has two."""
    mesh, model = ParallelMesh(tp=2), Entering()
    plan = ParallelPlan(layers=(), sequence_parallel=True, sequence_entrances=("embedding",))
    hyper_parallel.parallelize(model, mesh, plan)
    out = model(torch.arange(4).view(1, 4))
    out.sum().backward()
    hyper_parallel.finish_gradients(model, mesh)
    gradients = [parameter.grad.full_tensor().flatten().tolist() for parameter in model.parameters()]
    return {"out": list(out.shape), "gradients": gradients, "norm": hyper_parallel.clip_grad_norm_(model, math.inf).item()}


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, whichever of torch's two interfaces they go through."""

    KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = function._opname.replace("_", "")
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts.update(kind for kind in self.KINDS if name.startswith(kind))
        return function(*arguments, **(options or {}))


def forward_collectives(config: dict[str, Any], mesh: dict[str, int]) -> dict[str, int]:
    """The collectives of a forward pass up to the logits, without FSDP."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    model = build_model(settings.model, 0)
    apply_tensor_parallel(model, layout, parallel_plan(settings))
    with Collectives() as counted, torch.no_grad():
        model(torch.zeros(1, settings.training.seq_length, dtype=torch.int64))
    return dict(counted.counts)


def against_replay(config: dict[str, Any], mesh: dict[str, int], folder: str) -> dict[str, float]:
    """Distances of the gradients, all of them as one vector and relative, in low precision: of this layout from one process that
    rounds alike, and of each of the two from float32."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    wide = settings.training.model_copy(update={"compute_dtype": "float32"})
    engine = TorchEngine(settings, layout, "cpu")
    batches, rank = check_batches(settings), dist.get_rank()
    share = batches.share(1, layout.data_parallel_rank(rank), layout.data_parallel_size)
    micro_batches = share.split(settings.training.micro_batch_size or len(share.inputs))
    loss = engine.accumulate(micro_batches, batches.valid_tokens(1), lambda phase: None)
    dist.all_reduce(loss)
    path = Path(folder) / f"{rank}.npz"
    replayed_loss = write_reference(settings, layout.data_parallel_size, path)
    replay = read_reference(path)["right"]
    write_reference(settings.model_copy(update={"training": wide}), layout.data_parallel_size, path)
    exact = read_reference(path)["right"]
    ours = {name: _whole(parameter.grad).double().numpy() for name, parameter in engine.parameters.items()}
    assert ours.keys() == replay.keys() == exact.keys()
    size = _distance(exact, {name: 0.0 for name in exact})
    per_parameter = {name: _distance({name: ours[name]}, replay) for name in ours}
    worst = max(ours, key=lambda name: per_parameter[name] / _distance({name: replay[name]}, {name: 0.0}))
    return {
        "loss": float(loss),
        "replayed loss": replayed_loss,
        "from replay": _distance(ours, replay) / size,
        "from float32": _distance(ours, exact) / size,
        "replay from float32": _distance(replay, exact) / size,
        "worst": per_parameter[worst] / _distance({worst: replay[worst]}, {worst: 0.0}),
        "worst name": worst,
    }


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _distance(some: dict[str, Any], other: dict[str, Any]) -> float:
    return float(sum(((some[name] - other[name]) ** 2).sum() for name in some) ** 0.5)
