"""Rank programs in MindSpore: a small language model under tensor, sequence, pipeline and data parallelism at once, against the whole
model on the whole batch, element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from ms_programs import _parameter

VOCABULARY, WIDTH, INNER, SEQUENCE = 16, 8, 12, 6


def _plan(layers: int, sequence_parallel: bool, unit: str, recompute: bool) -> Any:
    from hyper_parallel.core.plan import ParallelPlan

    return ParallelPlan(
        layers=tuple(f"layer{i}" for i in range(layers)),
        unit=unit,
        activation_checkpointing=recompute,
        tensor_split={
            "layer*.experts.up": 1,
            "layer*.experts.down": 2,
            "layer*.mlp.up": 0,
            "layer*.mlp.down": 1,
            "embedding.weight": 0,
            "head.weight": 0,
        },
        regions=("layer*.mlp",),
        experts=("layer*.mlp.experts",),
        expert_shard_dims={"layer*.experts.up": 2, "layer*.experts.down": 1},
        embedding="embedding",
        head="head",
        sequence_parallel=sequence_parallel,
    )


def _language_model(layers: Sequence[int], first: bool, last: bool, experts: int = 0) -> Any:
    """Layers that mix the sequence inside their region, and norms outside of it; with ``experts``, each token also goes to one."""
    import mindspore as ms
    from mindspore import mint, nn

    from hyper_parallel.platform.mindspore.expert_parallel import ExpertDispatch
    from hyper_parallel.platform.mindspore.functional import grouped_linear, linear

    class Norm(nn.Cell):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.weight = _parameter(name, WIDTH)

        def construct(self, x: Any) -> Any:
            wide = x.astype(ms.float32)
            normed = wide * mint.rsqrt((wide * wide).mean(-1, keep_dims=True) + 1e-5)
            return (normed * self.weight.astype(ms.float32)).astype(x.dtype)

    class Experts(nn.Cell):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.up = _parameter(f"{name}.up", experts, INNER, WIDTH, spread=0.2)
            self.down = _parameter(f"{name}.down", experts, WIDTH, INNER, spread=0.2)
            self.dispatch = ExpertDispatch(experts)

        def construct(self, x: Any, chosen: Any) -> Any:
            return self.dispatch(x, chosen, self.compute)

        def compute(self, rows: Any, counts: Any) -> Any:
            hidden = grouped_linear(rows, self.up, counts)
            return grouped_linear(hidden * hidden, self.down, counts)

    class Mlp(nn.Cell):
        def __init__(self, name: str) -> None:
            super().__init__()
            if experts:
                self.experts = Experts(f"{name}.experts")
            self.mix = _parameter(f"{name}.mix", WIDTH)
            self.up = _parameter(f"{name}.up", INNER, WIDTH, spread=0.2)
            self.down = _parameter(f"{name}.down", WIDTH, INNER, spread=0.2)

        def construct(self, x: Any) -> Any:
            wide = x.astype(ms.float32)
            x = (wide + wide.mean(1, keep_dims=True) * self.mix.astype(ms.float32)).astype(x.dtype)
            hidden = linear(x, self.up)
            y = linear(hidden * hidden, self.down)
            if experts:
                rows = x.reshape((-1, WIDTH))
                chosen = ms.Tensor(np.abs(rows.asnumpy()[:, 0] * 1000).astype(np.int64) % experts)
                y = y + self.experts(rows, chosen).reshape(y.shape)
            return y

    class Layer(nn.Cell):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.norm = Norm(f"{name}.norm")
            self.mlp = Mlp(f"{name}.mlp")

        def construct(self, x: Any) -> Any:
            return x + self.mlp(self.norm(x))

    class Embedding(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = _parameter("embedding", VOCABULARY, WIDTH)

        def construct(self, ids: Any) -> Any:
            return self.weight.astype(ms.float32)[ids].astype(self.weight.dtype)

    class Head(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = _parameter("head", VOCABULARY, WIDTH)

        def construct(self, x: Any) -> Any:
            return linear(x, self.weight)

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.names = [f"layer{i}" for i in layers]
            if first:
                self.embedding = Embedding()
            for name in self.names:
                setattr(self, name, Layer(name))
            if last:
                self.norm = Norm("norm")
                self.head = Head()

        def construct(self, x: Any) -> Any:
            if first:
                x = self.embedding(x)
            for name in self.names:
                x = getattr(self, name)(x)
            return self.head(self.norm(x)) if last else x

    return Model()


def _tokens(size: int) -> tuple[Any, Any]:
    """Inputs and targets; targets of unequal numbers are left out (-100)."""
    ids = np.random.default_rng(3).integers(0, VOCABULARY, size=(size, SEQUENCE + 1)).astype(np.int32)
    targets = ids[:, 1:].copy()
    for row in range(size):
        targets[row, : row % 3] = -100
    return ids[:, :-1].copy(), targets


def _loss(tp: Any, tokens: int) -> Any:
    from hyper_parallel.platform.mindspore.cross_entropy import vocabulary_parallel_cross_entropy

    def loss(logits: Any, targets: Any) -> Any:
        flat = logits.reshape((-1, logits.shape[-1]))
        return vocabulary_parallel_cross_entropy(flat, targets.reshape((-1,)), tp) / tokens

    return loss


def _reference(layers: int, size: int, experts: int) -> tuple[dict[str, Any], float]:
    import mindspore as ms

    from hyper_parallel.platform.mindspore import autograd
    from hyper_parallel.platform.mindspore.collectives import Group

    ids, targets = _tokens(size)
    model = _language_model(range(layers), True, True, experts)
    params = list(model.get_parameters())
    with autograd.recording():
        total = _loss(Group((0,), 0, None), int((targets != -100).sum()))(model(ms.Tensor(ids)), ms.Tensor(targets))
    grads = autograd.backward(total, None, params)
    named = {p.name: g.contiguous().asnumpy() for p, g in zip(params, grads, strict=True)}
    return named, float(total)


def language_model(
    mesh: dict[str, int],
    sequence_parallel: bool = False,
    schedule: str = "1f1b",
    interleave: int = 1,
    micro_batches: int = 2,
    bfloat16: bool = False,
    reduce_dtype: str | None = "float32",
    steps: int = 1,
    fault: bool = False,
    unit: str = "layer",
    recompute: bool = False,
    experts: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """The worst gradient element, the norm and the loss of the parallel model, beside those of the whole one."""
    import mindspore as ms

    import hyper_parallel
    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.pipeline_layout import stages_of_rank
    from hyper_parallel.core.precision import MixedPrecisionPolicy, OffloadPolicy
    from hyper_parallel.core.sharding import local_pieces, parameter_cuts
    from hyper_parallel.platform.mindspore import collectives
    from hyper_parallel.platform.mindspore.fully_shard import param_group, states_of
    from hyper_parallel.platform.mindspore.layout import zero_grad
    from hyper_parallel.platform.mindspore.mesh import group

    layout = ParallelMesh(**mesh)
    rank = collectives.rank()
    position = layout.coordinates(rank)
    stage_count = layout.pp * interleave
    each = 2 if interleave == 1 and not bfloat16 else 1
    layers = each * stage_count
    size = layout.data_parallel_size * micro_batches * 2
    wanted, wanted_loss = _reference(layers, size, experts)
    if fault:
        param_group.resolve_reduce_dtype = lambda given, native: "float32" if given is None else given
    plan = _plan(layers, sequence_parallel, unit, recompute)
    policy = MixedPrecisionPolicy("bfloat16", "bfloat16", reduce_dtype) if bfloat16 else None
    offload = OffloadPolicy() if options.pop("offload", False) else None
    stages = []
    for index in stages_of_rank(schedule, layout.pp, interleave, position["pp"]):
        model = _language_model(range(each * index, each * (index + 1)), index == 0, index == stage_count - 1, experts)
        hyper_parallel.parallelize(model, layout, plan, policy, offload, **options)
        stages.append(hyper_parallel.PipelineStage(model, index, stage_count, mesh=layout))
    ids, targets = _tokens(size)
    share = layout.data_parallel_rank(rank)
    mine = [ms.Tensor(np.split(values, layout.data_parallel_size)[share]) for values in (ids, targets)]
    make = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B"}[schedule]
    loss = _loss(group(layout, "tp"), int((targets != -100).sum()))
    runner = getattr(hyper_parallel, make)(stages, micro_batches, loss)
    modules = [stage.module for stage in stages]
    for _ in range(steps):
        for module in modules:
            zero_grad(module)
        losses: list[Any] = []
        try:
            runner.step(mine[0], target=mine[1], losses=losses)
        except ValueError as error:
            return {"error": str(error), "frames": _frames(error)}
    worst = squares = 0.0
    for module in modules:
        for name, parameter in module.parameters_and_names():
            whole = wanted[parameter.name]
            pieces = local_pieces(whole.shape, parameter_cuts(plan, layout, name, rank))
            part = whole[tuple(slice(start, start + length) for start, length in pieces)]
            found = parameter.grad.astype(ms.float32).asnumpy()
            assert found.shape == part.shape, (name, found.shape, part.shape)
            if part.size:
                worst = max(worst, float(np.abs(found - part).max() / np.abs(whole).max()))
    squares = sum(float((g.astype(np.float64) ** 2).sum()) for g in wanted.values())
    norm = hyper_parallel.clip_grad_norm_(modules, 1.0, mesh=layout)
    sums = collectives.gather_numbers([sum(map(float, losses))], group(layout, "pp", "dp_replicate", "dp_shard"))
    groups = [g for module in modules for state in states_of(module) for g in state.groups]
    return {
        "worst": worst,
        "norm": float(norm),
        "bits": norm.asnumpy().tobytes(),
        "wanted norm": math.sqrt(squares),
        "loss": sum(value for (value,) in sums),
        "wanted loss": wanted_loss,
        "dtypes": sorted({g.layout.dtype for g in groups} | {str(g.allocate_fused_buffer().dtype).lower() for g in groups}),
        "reduced over": sorted({len(g.group.ranks) for g in groups}),
        "clipped": [p.grad.asnumpy().tobytes() for module in modules for p in module.get_parameters()],
    }


def _frames(error: BaseException) -> list[str]:
    names, trace = [], error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return names


def many(cases: Sequence[dict[str, Any]]) -> list[Any]:
    """:func:`language_model` for each case, in one set of ranks."""
    return [language_model(**case) for case in cases]


def activations(dim: int) -> dict[str, Any]:
    """Each communication of activations, forward and backward; rank r holds (r + 1) times 0, 1, 2, ..."""
    import mindspore as ms

    from hyper_parallel.platform.mindspore import activations as act
    from hyper_parallel.platform.mindspore import autograd, collectives

    size = collectives.world_size()
    ranks = collectives.make_group([tuple(range(size))])
    told: dict[str, Any] = {}
    uses = {
        "gather": lambda x: act.gather(x, dim, ranks),
        "reduce_scatter": lambda x: act.reduce_scatter(x, dim, ranks),
        "split": lambda x: act.split(x, dim, ranks),
        "all_reduce": lambda x: act.all_reduce(x, ranks),
        "sum_gradients": lambda x: act.sum_gradients(x, ranks),
    }
    for name, use in uses.items():
        x = ms.Tensor(np.arange(16, dtype=np.float32).reshape(2, 4, 2) * (collectives.rank() + 1))
        with autograd.recording():
            y = use(autograd.requiring_grad(x))
        seed = np.arange(y.size, dtype=np.float32).reshape(y.shape) + 100 * collectives.rank()
        (gradient,) = autograd.backward(y, ms.Tensor(seed), [x])
        told[name] = (y.asnumpy().tolist(), gradient.contiguous().asnumpy().tolist())
    return told
