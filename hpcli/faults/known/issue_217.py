"""A fused buffer that is given no dtype is float32, and the gradients that go into it are bfloat16."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import ByRank, Entry, OneOf, Raises
from hpcli.faults.fault import replace

_ERROR = Raises(
    "output_buffer dtype mismatch: expected BFloat16, got Float32",
    "ValueError",
    through=(
        "hyper_parallel/core/pipeline_parallel/scheduler.py:_exec_step",
        "hyper_parallel/core/pipeline_parallel/scheduler.py:_exec_fsdp_reduce_grad",
        "hyper_parallel/platform/mindspore/pipeline.py:execute_reduce_grad",
        "hyper_parallel/platform/mindspore/fully_shard/state.py:post_backward",
        "hyper_parallel/platform/mindspore/fully_shard/state.py:_issue_reduce_scatter_for_current_module",
        "hyper_parallel/platform/mindspore/fully_shard/param.py:reduce_scatter_grad",
    ),
)
_WAITS = Raises("Timed out waiting")  # for a message of a rank that has ended in the error already
_INTERLEAVED = ("interleave 1", "interleave 2")


def _errors(ranks: int) -> ByRank:
    """The ranks of the last stage end in the error; the others too, unless what they wait for is lost with those."""
    stages = (OneOf((_ERROR, _WAITS)), _ERROR)
    return ByRank(tuple(dict.fromkeys(_INTERLEAVED, stages[rank >= ranks // 2]) for rank in range(ranks)))


ENTRY = Entry(
    id="issue-217",
    title="the fused buffer of reduce_dtype None is float32, the gradients bfloat16",
    kind="reduce",
    source="hyper-parallel gitcode#217",
    condition="MindSpore, latent attention (MLA), 8 ranks: pipeline 2, dp_shard 2, tensor 2 with the "
    "sequence cut; bfloat16, accumulate_allreduce_grads_in_fp32 false; on 4 ranks without tensor parallelism",
    shown_by="planted",
    wrong=_errors,
    right={
        f"{layout}: {what}": value
        for layout in _INTERLEAVED
        for what, value in {"fused buffers": "bfloat16", "norm over one process's": 1.0}.items()
    },
    how_we_know="the gradient of a bfloat16 weight is bfloat16, and None asks for no other; the norm is "
    "that of the whole model in one process, in the same dtypes, to 2 %",
    why="To the author None meant the gradient's own dtype, to the allocator it means float32. Layout and "
    "buffer were made by the one reading, the reduction by the other, and the first backward ends in the "
    "check between them. Here one function resolves None, and all of them ask it.",
    ranks=(8, 4),
    seconds=10.0,
    platform="mindspore",
    timeout_seconds=12.0,
    tolerance=2e-2,
)


def right() -> dict[str, Any]:
    from functools import partial

    from hpcli.faults.attempt import attempts

    return attempts({layout: partial(_step, number) for number, layout in enumerate(_INTERLEAVED, 1)})


def _step(interleave: int) -> dict[str, Any]:
    """A training step: what the fused buffers are in, and the gradient norm."""
    import mindspore as ms
    import numpy as np

    import hyper_parallel
    from hpcli.faults.latent_attention import Decoder, plan_of
    from hyper_parallel.core.pipeline_layout import stages_of_rank
    from hyper_parallel.platform.mindspore import collectives
    from hyper_parallel.platform.mindspore.fully_shard import states_of

    rank, ranks = collectives.rank(), collectives.world_size()
    mesh = hyper_parallel.ParallelMesh(pp=2, dp_shard=2, tp=ranks // 4)
    policy = hyper_parallel.MixedPrecisionPolicy("bfloat16", "bfloat16", None)
    schedule = "1f1b" if interleave == 1 else "interleaved_1f1b"
    count = mesh.pp * interleave
    stages = []
    for index in stages_of_rank(schedule, mesh.pp, interleave, mesh.coordinates(rank)["pp"]):
        model = Decoder([index], index == 0, index == count - 1)
        hyper_parallel.parallelize(model, mesh, plan_of(count), policy)
        stages.append(hyper_parallel.PipelineStage(model, index, count, mesh=mesh))
    ids, targets = _batch()
    mine = [ms.Tensor(np.split(v, 2)[mesh.data_parallel_rank(rank)]) for v in (ids, targets)]
    make = hyper_parallel.Schedule1F1B if interleave == 1 else hyper_parallel.ScheduleInterleaved1F1B
    make(stages, 2, _loss(mesh)).step(mine[0], target=mine[1])
    modules = [stage.module for stage in stages]
    buffers = {str(g.allocate_fused_buffer().dtype).lower() for m in modules for s in states_of(m) for g in s.groups}
    norm = hyper_parallel.clip_grad_norm_(modules, 1.0, mesh=mesh)
    return {"fused buffers": ", ".join(sorted(buffers)), "norm over one process's": float(norm) / _whole_norm(count)}


def _batch() -> Any:
    import numpy as np

    from hpcli.faults.latent_attention import SEQUENCE, VOCABULARY

    ids = np.random.default_rng(3).integers(0, VOCABULARY, size=(8, SEQUENCE + 1)).astype(np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def _loss(mesh: Any) -> Any:
    from hyper_parallel.platform.mindspore.collectives import Group
    from hyper_parallel.platform.mindspore.cross_entropy import vocabulary_parallel_cross_entropy
    from hyper_parallel.platform.mindspore.mesh import group

    ranks = group(mesh, "tp") if mesh is not None else Group((0,), 0, None)
    tokens = _batch()[1].size

    def loss(logits: Any, targets: Any) -> Any:
        flat = logits.reshape((-1, logits.shape[-1]))
        return vocabulary_parallel_cross_entropy(flat, targets.reshape((-1,)), ranks) / tokens

    return loss


def _whole_norm(layers: int) -> float:
    """The norm of the whole model on the whole batch in this process, with bfloat16 weights."""
    import mindspore as ms

    from hpcli.faults.latent_attention import Decoder
    from hyper_parallel.platform.mindspore import autograd

    model = Decoder(range(layers), True, True)
    for parameter in model.get_parameters():
        parameter.set_dtype(ms.bfloat16)
    parameters = list(model.get_parameters())
    ids, targets = (ms.Tensor(values) for values in _batch())
    with autograd.recording():
        total = _loss(None)(model(ids), targets)
    gradients: list[Any] = list(autograd.backward(total, None, parameters))
    found = [gradient.contiguous().astype(ms.float32).asnumpy().astype("float64") for gradient in gradients]
    return float(sum((values**2).sum() for values in found)) ** 0.5


def patch() -> None:
    import mindspore as ms

    from hyper_parallel.core.pipeline_parallel import PipelineScheduler
    from hyper_parallel.core.precision import dtype_name, resolve_reduce_dtype
    from hyper_parallel.platform.mindspore.fully_shard import param_group

    def as_the_allocator_reads_it(reduce_dtype: Any, native: Any) -> str:
        if reduce_dtype is None:
            return dtype_name(ms.mint.empty((1,), dtype=None).dtype)
        return resolve_reduce_dtype(reduce_dtype, native)

    forget, under_way = PipelineScheduler._forget, []

    def let_messages_arrive(self: Any) -> None:
        # a message that is let go of while it is sent never arrives, and its receiver times out before its own error
        under_way.append(self.__dict__.get("_sending"))
        forget(self)

    replace(param_group, "resolve_reduce_dtype", as_the_allocator_reads_it)
    replace(PipelineScheduler, "_forget", let_messages_arrive)
