"""Rank programs in MindSpore: small models, sharded and whole in the same process, compared element by element.

Nothing here may execute an operation while it is imported: it is imported before ranks are forked.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np


def call(
    answer: Any, program: str, rank: int, world_size: int, meeting: str, folder: str, arguments: dict[str, Any]
) -> None:
    """Call ``program`` ("module:function") inside a process group and send back what it returns, or its error."""
    os.chdir(folder)
    import hyper_parallel
    from hyper_parallel.platform.mindspore import collectives

    try:
        hyper_parallel.init(
            "mindspore", "cpu", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout_seconds=30
        )
        module, _, function = program.partition(":")
        result = getattr(import_module(module), function)(**arguments)
        answer.send(("result", result))
        collectives.barrier()
        collectives.stop()
    except BaseException:  # noqa: BLE001 (whatever ends a rank is the test's to show)
        answer.send(("error", traceback.format_exc()))
        os._exit(1)  # not through MindSpore's exit handlers, which may wait for other ranks
    os._exit(0)


def collectives_by_hand(dtype: str) -> dict[str, Any]:
    """Each collective on small numbers."""
    import mindspore as ms

    from hyper_parallel.core.flat_buffer import Slot
    from hyper_parallel.platform.mindspore import collectives as c
    from hyper_parallel.platform.mindspore.tensors import zeros

    rank, size = c.rank(), c.world_size()
    world = c.make_group([tuple(range(size))])

    def tensor(*values: float) -> ms.Tensor:
        return ms.Tensor(np.array(values, np.float32)).astype(getattr(ms, dtype))

    def numbers(x: ms.Tensor) -> list[float]:
        return x.astype(ms.float32).asnumpy().ravel().tolist()

    told: dict[str, Any] = {}
    told["all_reduce"] = numbers(c.all_reduce(tensor(rank, 1), world).wait())
    told["max"] = numbers(c.all_reduce(tensor(rank, -rank), world, "max").wait())
    told["all_gather"] = numbers(c.all_gather(tensor(rank, 10 * rank), world).wait())
    output = zeros((4,), dtype)
    rows = tensor(*(10 * r + rank for r in range(size) for _ in range(2)))
    told["reduce_scatter"] = numbers(c.reduce_scatter(output, Slot(1, 2), rows, world).wait())
    sent = [i + 1 for i in range(size)]  # i + 1 rows to rank i
    rows = tensor(*(10 * rank + i for i, n in enumerate(sent) for _ in range(n)))
    told["all_to_all"] = numbers(c.all_to_all(rows, world, [rank + 1] * size, sent).wait())
    told["broadcast"] = numbers(c.broadcast(tensor(rank + 5), world, 1).wait())
    ring = [c.receive((1,), dtype, world, (rank - 1) % size), c.send(tensor(rank), world, (rank + 1) % size)]
    told["ring"] = numbers(ring[0].wait())
    ring[1].wait()
    pair = c.make_group([(i, i + 1) for i in range(0, size, 2)])
    told["pair"] = numbers(c.all_reduce(tensor(rank), pair).wait())
    told["numbers"] = c.gather_numbers([rank + 2**-40], world)
    told["objects"] = c.gather_objects({"rank": rank}, world)
    return told


def _parameter(name: str, *shape: int, spread: float = 0.5) -> Any:
    import mindspore as ms

    values = np.random.default_rng([*map(ord, name)]).normal(size=shape).astype(np.float32) * np.float32(spread)
    return ms.Parameter(ms.Tensor(values), name=name)


def _model(kind: str) -> Any:
    """ "plain": two blocks of width 6 and an output of 5; "odd": tied, frozen and 0-dim parameters too."""
    from mindspore import nn

    from hyper_parallel.platform.mindspore.functional import linear

    odd = kind == "odd"

    class Block(nn.Cell):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.up = _parameter(f"{name}.up", 8, 6)
            self.down = _parameter(f"{name}.down", 6, 8)

        def construct(self, x: Any) -> Any:
            hidden = linear(x, self.up)
            return x + linear(hidden * hidden, self.down)

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block("first")
            self.second = Block("second")
            self.out = _parameter("out", 5, 6)
            if odd:
                self.again = self.out  # tied
                self.factor = _parameter("factor")
                self.frozen = _parameter("frozen", 6)
                self.frozen.requires_grad = False

        def construct(self, x: Any) -> Any:
            if odd:
                x = x * self.factor + self.frozen
            y = linear(self.second(self.first(x)), self.out)
            if odd:
                y = y + linear(x, self.again)
            return y

    return Model()


def _batch(size: int) -> Any:
    return np.random.default_rng(7).normal(size=(size, 6)).astype(np.float32)


def _loss(output: Any) -> Any:
    """The sum over elements of a smooth function, so that a global batch's loss is the sum of its parts'."""
    import mindspore as ms

    output = output.astype(ms.float32)
    return (output * output).sum() * 0.1 + output.sum()


def _whole_gradients(kind: str, batch: Any, dtype: str = "float32") -> dict[str, Any]:
    import mindspore as ms

    from hyper_parallel.platform.mindspore import autograd

    model = _model(kind)
    params = [p for p in model.get_parameters() if p.requires_grad]
    with autograd.recording():
        loss = _loss(model(ms.Tensor(batch)))
    grads = autograd.backward(loss, None, params)
    return {p.name: (g.contiguous().asnumpy(), float(loss)) for p, g in zip(params, grads, strict=True)}


def _worst(model: Any, wanted: dict[str, Any], mesh: Any, pieces: Callable[..., Any] | None = None) -> float:
    """The largest difference between this rank's gradients and its pieces of the whole ones, relative to the largest element."""
    from hyper_parallel.core.sharding import piece
    from hyper_parallel.platform.mindspore import collectives
    from hyper_parallel.platform.mindspore.layout import gradient_of

    position = mesh.coordinates(collectives.rank())
    worst, seen = 0.0, set()
    for parameter in model.get_parameters():
        if not parameter.requires_grad:
            assert gradient_of(parameter) is None, parameter.name
            continue
        whole = np.atleast_1d(wanted[parameter.name][0])
        start, length = piece(whole.shape[0], mesh.dp_shard, position["dp_shard"])
        part = whole[start : start + length]
        found = gradient_of(parameter).asnumpy()
        assert found.shape == part.shape, (parameter.name, found.shape, part.shape)
        if part.size:
            worst = max(worst, float(np.abs(found - part).max() / np.abs(whole).max()))
        seen.add(parameter.name)
    assert seen == set(wanted), (seen, set(wanted))
    return worst


def sharded_gradients(
    kind: str = "plain",
    mesh: dict[str, int] | None = None,
    units: str = "nested",
    micro_batches: int = 1,
    steps: int = 1,
    value_and_grad: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Gradients of the sharded model on this rank's share of the batch against those of a whole one on the whole batch."""
    import mindspore as ms

    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.precision import OffloadPolicy
    from hyper_parallel.platform.mindspore import autograd, collectives
    from hyper_parallel.platform.mindspore.fully_shard import (
        fully_shard,
        set_requires_gradient_sync,
        states_of,
    )
    from hyper_parallel.platform.mindspore.layout import zero_grad

    layout = ParallelMesh(**(mesh or {"dp_shard": collectives.world_size()}))
    batch = _batch(4 * layout.data_parallel_size)
    wanted = _whole_gradients(kind, batch)
    model = _model(kind)
    if options.pop("offload", False):
        options["offload_policy"] = OffloadPolicy()
    if units == "nested":
        for block in (model.first, model.second):
            fully_shard(block, mesh=layout, **options)
    elif units == "several":
        fully_shard([model.first, model.second], mesh=layout, **options)
    fully_shard(model, mesh=layout, **options)
    share = np.split(batch, layout.data_parallel_size)[layout.data_parallel_rank(collectives.rank())]
    shards = [p for p in model.get_parameters() if p.requires_grad]
    for _ in range(steps):
        zero_grad(model)
        for index, part in enumerate(np.split(share, micro_batches)):
            set_requires_gradient_sync(model, index == micro_batches - 1)
            if value_and_grad:
                _, returned = ms.value_and_grad(lambda x: _loss(model(x)), None, shards)(ms.Tensor(part))
                assert all(np.array_equal(g.asnumpy(), p.grad.asnumpy()) for g, p in zip(returned, shards, strict=True))
                continue
            with autograd.recording():
                loss = _loss(model(ms.Tensor(part)))
            autograd.backward(loss, None, shards)
    held = [s for s in states_of(model) if s._whole is not None or s._whole_again is not None]
    return {"worst": _worst(model, wanted, layout), "states": len(states_of(model)), "held": len(held)}


def many(function: str, cases: Sequence[dict[str, Any]]) -> list[Any]:
    """What ``function`` returns for each case, in one set of ranks."""
    return [globals()[function](**case) for case in cases]


def life_of_whole_parameters(reshard_after_forward: bool) -> dict[str, Any]:
    """How often units are gathered and reduced in one step, and how many whole parameters live after forward and at the end.

    MindSpore's own account of memory is empty on a CPU. Whole parameters are given memory of NumPy arrays here, whose end can be seen.
    """
    import gc
    import weakref

    import mindspore as ms

    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.platform.mindspore import autograd, collectives
    from hyper_parallel.platform.mindspore.fully_shard import fully_shard, state

    counts = {"all_gather": 0, "reduce_scatter": 0}
    arrays: list[Any] = []
    read_whole = state.read_whole

    def counted(name: str) -> Any:
        original = getattr(collectives, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        return call

    def in_an_array(*arguments: Any) -> Any:
        array = read_whole(*arguments).asnumpy().copy()
        arrays.append(weakref.ref(array))
        return ms.Tensor.from_numpy(array)

    def living() -> int:
        gc.collect()
        return sum(reference() is not None for reference in arrays)

    for name in counts:
        setattr(collectives, name, counted(name))
    state.read_whole = in_an_array
    mesh = ParallelMesh(dp_shard=collectives.world_size())
    model = _model("plain")
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward, comm_fusion=True)
    with autograd.recording():
        loss = _loss(model(ms.Tensor(_batch(2))))
    told: dict[str, Any] = {"after forward": living()}
    autograd.backward(loss, None, list(model.get_parameters()))
    del loss
    return told | {"at the end": living()} | counts


def low_precision(
    reduce_dtype: str | None, micro_batches: int = 1, mesh: dict[str, int] | None = None, **options: Any
) -> dict[str, Any]:
    """Witnesses: rank r's gradient is 1 or 2**-10 in turn, or 256, 1, 1 over micro-batches, through the real reducer."""
    import mindspore as ms
    from mindspore import nn

    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.precision import MixedPrecisionPolicy
    from hyper_parallel.platform.mindspore import autograd, collectives
    from hyper_parallel.platform.mindspore.fully_shard import (
        fully_shard,
        set_requires_gradient_sync,
        states_of,
    )
    from hyper_parallel.platform.mindspore.layout import TensorCut, note_tensor_cut

    class Weight(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = ms.Parameter(ms.Tensor(np.ones((4, 2), np.float32)), name="weight")

        def construct(self, factor: Any) -> Any:
            return (self.weight * factor).astype(ms.float32).sum()

    layout = ParallelMesh(**(mesh or {"dp_shard": collectives.world_size()}))
    model = Weight()
    if layout.tp > 1:
        note_tensor_cut(model.weight, TensorCut(None, partial=True))
    fully_shard(model, mesh=layout, mp_policy=MixedPrecisionPolicy("bfloat16", "bfloat16", reduce_dtype), **options)
    alone = collectives.world_size() // 2
    factors = [256.0, 1.0, 1.0] if micro_batches == 3 else [1.0 if collectives.rank() % 2 == 0 else 2.0**-10]
    if micro_batches == 3 and collectives.rank() >= 1:
        factors = [0.0, 0.0, 0.0]
    for index, factor in enumerate(factors):
        set_requires_gradient_sync(model, index == len(factors) - 1)
        with autograd.recording():
            loss = model(ms.Tensor(np.full((4, 2), factor, np.float32)).astype(ms.bfloat16))
        autograd.backward(loss, None, [model.weight])
    gradient = model.weight.grad
    (state,) = states_of(model)
    (group,) = state.groups
    return {
        "values": sorted(set(gradient.asnumpy().ravel().tolist())),
        "dtype": str(gradient.dtype),
        "layout": (group.layout.dtype, [tuple(slot) for slot in group.layout.slots], group.layout.total),
        "buffer": str(group.allocate_fused_buffer().dtype),
        "ranks": group.group.ranks,
        "pairs": alone,
    }


def reported_fault(comm_fusion: bool = False) -> dict[str, str]:
    """issue-217 put back: the group reads a missing reduce dtype as an allocator does."""
    import mindspore as ms

    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.precision import MixedPrecisionPolicy
    from hyper_parallel.platform.mindspore import autograd
    from hyper_parallel.platform.mindspore.fully_shard import fully_shard, param_group

    param_group.resolve_reduce_dtype = lambda reduce_dtype, native: "float32" if reduce_dtype is None else reduce_dtype
    model = _model("plain").first
    policy = MixedPrecisionPolicy("bfloat16", "bfloat16", None)
    fully_shard(model, mesh=ParallelMesh(dp_replicate=2, dp_shard=2), mp_policy=policy, comm_fusion=comm_fusion)
    with autograd.recording():
        loss = _loss(model(ms.Tensor(_batch(6)).astype(ms.bfloat16)))
    try:
        autograd.backward(loss, None, list(model.get_parameters()))
    except ValueError as error:
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        return {"message": str(error), "frames": frames}
    return {"message": "", "frames": []}


def trained(steps: int, offload: bool, mesh: dict[str, int]) -> dict[str, Any]:
    """Losses of some AdamW steps with clipping, of the sharded model and of the whole one, and the parameters after them."""
    import math

    import mindspore as ms

    import hyper_parallel
    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.precision import OffloadPolicy
    from hyper_parallel.core.sharding import piece
    from hyper_parallel.platform.mindspore import autograd, collectives
    from hyper_parallel.platform.mindspore.fully_shard import fully_shard
    from hyper_parallel.platform.mindspore.layout import zero_grad
    from hyper_parallel.platform.mindspore.optimizer import AdamW

    layout = ParallelMesh(**mesh)
    batch = _batch(4 * layout.data_parallel_size)

    def run(model: Any, part: Any, scope: Any) -> tuple[list[float], Any]:
        optimizer = AdamW(model.get_parameters(), lr=0.01)
        losses = []
        for _ in range(steps):
            zero_grad(model)
            with autograd.recording():
                loss = _loss(model(ms.Tensor(part)))
            found = autograd.backward(loss, None, optimizer.parameters)
            if scope is None:
                for parameter, gradient in zip(optimizer.parameters, found, strict=True):
                    parameter.grad = gradient.contiguous()
            assert math.isfinite(float(hyper_parallel.clip_grad_norm_(model, 1.0, mesh=scope)))
            optimizer.step()
            losses.append(float(loss))
        return losses, {p.name: np.atleast_1d(p.asnumpy()) for p in model.get_parameters()}

    whole_losses, wanted = run(_model("odd"), batch, None)
    model = _model("odd")
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=layout, offload_policy=OffloadPolicy() if offload else None)
    share = np.split(batch, layout.data_parallel_size)[layout.data_parallel_rank(collectives.rank())]
    losses, found = run(model, share, layout)
    world = collectives.make_group([tuple(range(collectives.world_size()))])
    sums = [sum(column) for column in zip(*collectives.gather_numbers(losses, world), strict=True)]
    worst = 0.0
    for name, whole in wanted.items():
        start, length = piece(whole.shape[0], layout.dp_shard, layout.coordinates(collectives.rank())["dp_shard"])
        worst = max(worst, float(np.abs(found[name] - whole[start : start + length]).max(initial=0)))
    return {"losses": sums, "whole": whole_losses, "worst": worst}
