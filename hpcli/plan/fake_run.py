"""Forward and backward of one micro-batch on tensors without memory: what backward needs, what comes and goes, what is sent.

The modules are the ones that train, cut by the same code; only FSDP is left out, which costs seconds at this size and whose part is
arithmetic. Process groups are fake. Layers of a kind are alike, so one or two of each tell about any number. Tokens are taken to
go evenly to the experts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcli.config.schema import Config
from hpcli.models.parallel import parallel_plan
from hpcli.models.stages import StageLayers
from hpcli.models.torch.decoder import Decoder
from hpcli.models.torch.layers import rotary_table
from hpcli.models.torch.vlm import VisionLanguageModel
from hpcli.plan.memory import hidden_shape
from hpcli.plan.shards import is_frozen
from hpcli.train.torch_loss import GlobalLoss
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.platform.torch.expert_parallel import ExpertDispatch
from hyper_parallel.platform.torch.mesh import device_mesh, expert_mesh, forget_meshes
from hyper_parallel.platform.torch.parallelize import divide

KINDS = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
}


class Sent(NamedTuple):
    """One collective: what kind, over which axis, and the bytes of the larger of its buffers on a rank."""

    kind: str
    axis: str
    bytes: int


class MicroBatch(NamedTuple):
    """What one micro-batch takes of one stage on one rank.

    Attributes:
        saved: bytes that are kept from forward to backward, parameters and what the stage before sent not counted.
        temporary: bytes that are there beside them at the worst moment.
        sent: collectives of tensor and expert parallelism, and how often.
    """

    saved: int
    temporary: int
    sent: Counter[Sent]


@contextmanager
def fake_ranks(mesh: ParallelMesh) -> Iterator[None]:
    """A process group of as many ranks as ``mesh`` has, of which this process is rank 0 and that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a plan needs a process without a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.world_size)
    try:
        forget_meshes()
        device_mesh(mesh, "cpu")
        if mesh.ep > 1:
            expert_mesh(mesh, "cpu")
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def run_stage(config: Config, mesh: ParallelMesh, stage: StageLayers) -> MicroBatch:
    """Run one micro-batch through ``stage`` of the model of ``config``, inside :func:`fake_ranks`."""
    compute = getattr(torch, config.training.compute_dtype)
    kind = VisionLanguageModel if config.model.kind == "vlm" else Decoder
    with _no_tables(), FakeTensorMode():
        with _default_dtype(compute):
            module: nn.Module = kind(config.model, stage)
        divide(module, mesh, parallel_plan(config), "cpu")
        for part in module.modules():
            if isinstance(getattr(part, "dispatch", None), ExpertDispatch):
                part.dispatch.on_host = _evenly  # type: ignore[union-attr]
        for name, parameter in module.named_parameters():
            if is_frozen(config, name, stage):
                parameter.requires_grad_(False)
            else:  # gradients of parameters are counted elsewhere
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        inputs, labels = _inputs(config, mesh, stage, compute)
        watch = _Watch([*module.parameters(), *inputs], mesh.tp)
        loss = GlobalLoss(mesh, config.model.vocab_size or 0)
        with loss.context(), watch:
            with torch.autograd.graph.saved_tensors_hooks(watch.save, lambda tensor: tensor):
                output = module(*inputs)
                if stage.last:
                    output = loss(output, labels)
            saved = watch.saved
            output.backward(None if stage.last else torch.empty_like(output))
    return MicroBatch(saved, watch.peak - saved, watch.sent)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _no_tables() -> Iterator[None]:
    """Tables that are made once in a process must be neither met here nor left behind."""
    rotary_table.cache_clear()
    try:
        yield
    finally:
        rotary_table.cache_clear()


def _evenly(counts: torch.Tensor) -> Any:
    """The counts of an ExpertDispatch if every expert has as many rows, as near as whole numbers get."""
    rows = _evenly.rows  # type: ignore[attr-defined]
    each = [rows // counts.shape[-1] + (i < rows % counts.shape[-1]) for i in range(counts.shape[-1])]
    return [each] * 2 if counts.ndim == 2 else each


def _inputs(
    config: Config, mesh: ParallelMesh, stage: StageLayers, compute: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    model, training = config.model, config.training
    batch, tokens = training.micro_batch_size or 1, training.seq_length
    hidden = hidden_shape(config, mesh)
    positions = hidden[1] * (mesh.tp if config.parallelism.sequence_parallel else 1)
    _evenly.rows = batch * positions * (model.experts_per_token or 0)  # type: ignore[attr-defined]
    labels = torch.zeros(batch, positions, dtype=torch.int64)
    if not stage.first:
        return [torch.empty(hidden, dtype=compute, requires_grad=True)], labels
    inputs = [torch.zeros(batch, tokens, dtype=torch.int64)]
    if model.kind == "vlm":
        inputs.append(torch.empty(batch, model.image_height or 0, model.image_width or 0, dtype=compute))
    return inputs, labels


class _Watch(TorchDispatchMode):
    """Follows memory and collectives through everything that runs inside it. What is ``known`` before does not count."""

    def __init__(self, known: list[Any], tp: int) -> None:
        super().__init__()
        self.tp = tp
        self.known = {self._storage(tensor)._cdata for tensor in known}
        self.live: dict[int, Any] = {}
        self.now = self.peak = self.saved = 0
        self.kept: set[int] = set()
        self.sent: Counter[Sent] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors comes here too
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        self._count(func, args, result)
        return result

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called with everything that autograd keeps."""
        storage = self._storage(tensor)
        if storage._cdata not in self.known and storage._cdata not in self.kept:
            self.kept.add(storage._cdata)
            self.saved += storage.nbytes()
        return tensor

    @staticmethod
    def _storage(tensor: Any) -> Any:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage()

    def _note(self, tensor: torch.Tensor) -> None:
        storage = self._storage(tensor)
        key = storage._cdata
        if key in self.live or key in self.known:
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.live[key] = weakref.ref(storage, lambda _: self._free(key, size))

    def _free(self, key: int, size: int) -> None:
        self.live.pop(key, None)
        self.kept.discard(key)
        self.now -= size

    def _count(self, func: Any, args: Any, result: Any) -> None:
        if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return
        name = func._opname
        kind = next((text for start, text in KINDS.items() if name.lstrip("_").startswith(start)), None)
        if kind is None:
            return
        sizes = [sum(t.nbytes for t in tree_leaves(side) if isinstance(t, torch.Tensor)) for side in (args, result)]
        if func.namespace == "c10d":  # takes its output as an argument
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        group = _group(args)
        ranks = dist.get_process_group_ranks(group) if group is not None else [0, 0]
        self.sent[Sent(kind, "tp" if ranks[1] - ranks[0] < self.tp else "ep", max(sizes))] += 1


def _group(arguments: Any) -> dist.ProcessGroup | None:
    """The process group among the arguments of a collective, by its name or itself."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except RuntimeError:  # the operation of a reduction is an object too
                continue
        if isinstance(argument, str) and argument.isdigit():
            return _resolve_process_group(argument)  # type: ignore[arg-type]
    return None
