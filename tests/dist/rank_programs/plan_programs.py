"""Rank programs: what a rank really holds after steps of training, to be compared with what was planned."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import ParallelMesh


def held(config: dict[str, Any], mesh: dict[str, int]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state in this rank's memory, each allocation once."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    training = settings.training
    batches = make_batches(settings)
    for step in (1, 2):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        engine.accumulate(share.split(training.micro_batch_size or 1), batches.valid_tokens(step), lambda phase: None)
        gradients = _bytes([p.grad for module in engine.parts for p in module.parameters() if p.grad is not None])
        engine.clip()
        engine.update(1e-3)
        engine.zero_grad()
    state = [value for known in engine.optimizer.inner.state.values() for value in known.values()]
    masters = engine.optimizer.masters if engine.optimizer.storage else []
    return {
        "parameters": _bytes([p for module in engine.parts for p in module.parameters()]),
        "gradients": gradients,
        "optimizer_state": _bytes([value for value in [*state, *masters] if isinstance(value, torch.Tensor)]),
    }


def _bytes(tensors: list[Any]) -> int:
    held = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        held[storage._cdata] = storage.nbytes()
    return sum(held.values())


def saved(config: dict[str, Any], mesh: dict[str, int]) -> dict[str, Any]:
    """Bytes that autograd keeps of a micro-batch on this rank, each allocation once, without what a plan counts elsewhere:
    parameters, and what comes from the stage before."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    size = settings.training.micro_batch_size or 1
    batches = make_batches(settings)
    share = batches.share(1, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
    micro_batches = share.split(size)
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in kept:
            kept[storage._cdata] = (storage, storage.nbytes())  # held, so that no other gets its address
        return tensor

    stages = engine._run.schedule._stages if hasattr(engine._run, "schedule") and hasattr(engine._run.schedule, "_stages") else (
        [engine._run.schedule._stage] if hasattr(engine._run, "schedule") else [])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.accumulate(micro_batches, batches.valid_tokens(1), lambda phase: None)
    known = [p for part in engine.parts for p in _gathered(part)]
    known += [info.buffer for stage in stages for infos in stage.args_recv_info.values() for info in infos if info.buffer is not None]
    for tensor in known:
        kept.pop(tensor.untyped_storage()._cdata, None)
    return {"saved": sum(size for _, size in kept.values()) // len(micro_batches)}


def _gathered(part: Any) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FSDPModule

    states = [m._get_fsdp_state() for m in part.modules() if isinstance(m, FSDPModule)]
    return [t for s in states for g in s._fsdp_param_groups for p in g.fsdp_params for t in p.all_gather_outputs]


class _Counter(TorchDispatchMode):
    """Collectives by kind, number of ranks, and bytes of the larger buffer; of an all-to-all, what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._opname.lstrip("_")
        kind = next((text for start, text in _KINDS.items() if name.startswith(start)), None)
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and kind:
            sides = [args] if func.namespace == "c10d" else [args, result]
            sizes = [t.nbytes for side in sides for t in tree_leaves(side) if isinstance(t, torch.Tensor)]
            if kind == "all-to-all":  # what is sent: it depends on the tokens what comes back
                sizes = sizes[1:2] if func.namespace == "c10d" else sizes[:1]
            self.seen[kind, _ranks(args) if kind not in ("send", "receive") else 2, max(sizes)] += 1
        return result


_KINDS = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "send": "send",
    "recv": "receive",
}


def _ranks(arguments: Any) -> int:
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except RuntimeError:
                continue
        if isinstance(argument, str) and argument.isdigit():
            return _resolve_process_group(argument).size()
    return 0


def collectives(config: dict[str, Any], mesh: dict[str, int]) -> list[list[Any]]:
    """[kind, ranks, bytes, times] of every collective in the second step of training."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    batches = make_batches(settings)
    counter = _Counter()
    for step in (1, 2):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        micro_batches = share.split(settings.training.micro_batch_size or 1)
        with counter if step == 2 else nullcontext():
            engine.step(micro_batches, batches.valid_tokens(step), 1e-3, lambda phase: None)
    return sorted([*key, times] for key, times in counter.seen.items())


def peak(config: dict[str, Any], mesh: dict[str, int]) -> dict[str, int]:
    """Bytes that were allocated at the worst moment of a step beyond what was there before it."""
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    batches = make_batches(settings)
    for step in (1, 2):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        micro_batches = share.split(settings.training.micro_batch_size or 1)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) if step == 2 else nullcontext() as seen:
            engine.step(micro_batches, batches.valid_tokens(step), 1e-3, lambda phase: None)
    now = most = 0
    for event in sorted(
        (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
    return {"peak": most}
