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
    from hyper_parallel.platform.mindspore import collectives
    from hyper_parallel.platform.mindspore.mesh import init_process_group

    try:
        init_process_group(
            "cpu", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout_seconds=30
        )
        module, _, function = program.partition(":")
        result = getattr(import_module(module), function)(**arguments)
        answer.send(("result", result))
        collectives.barrier()
        collectives.stop()
    except BaseException:
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


def _parameter(name: str, *shape: int, seed: int = 0) -> Any:
    import mindspore as ms

    values = np.random.default_rng([seed, *map(ord, name)]).normal(size=shape).astype(np.float32) * 0.5
    return ms.Parameter(ms.Tensor(values), name=name)


def _model(kind: str, bfloat16: bool = False) -> Any:
    """ "plain": two blocks of width 6 and an output of 5; "odd": tied, frozen, 0-dim and uneven parameters too."""
    import mindspore as ms
    from mindspore import mint, nn

    from hyper_parallel.platform.mindspore.functional import linear

    odd = kind == "odd"

    class Block(nn.Cell):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.up = _parameter(f"{name}.up", 8, 6)
            self.down = _parameter(f"{name}.down", 6, 8)
            self.scale = _parameter(f"{name}.scale", 6)

        def construct(self, x: Any) -> Any:
            return x + linear(mint.nn.functional.relu(linear(x * self.scale, self.up)), self.down)

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

    model = Model()
    del ms
    return model


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
    **options: Any,
) -> dict[str, Any]:
    """Gradients of the sharded model on this rank's share of the batch against those of a whole one on the whole batch."""
    import mindspore as ms

    from hyper_parallel.core.mesh import ParallelMesh
    from hyper_parallel.core.precision import OffloadPolicy
    from hyper_parallel.platform.mindspore import autograd, collectives
    from hyper_parallel.platform.mindspore.fully_shard import fully_shard, set_requires_gradient_sync, states_of
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
            with autograd.recording():
                loss = _loss(model(ms.Tensor(part)))
            autograd.backward(loss, None, shards)
    held = [s for s in states_of(model) if s._whole is not None or s._whole_again is not None]
    return {"worst": _worst(model, wanted, layout), "states": len(states_of(model)), "held": len(held)}
