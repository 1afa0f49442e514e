"""Each rank's part of a training run: the same loop on every platform."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcli.config.schema import Config, OptimizerSection
from hpcli.data.batches import Batches, make_batches
from hpcli.launch.context import RankContext
from hpcli.report.verdict import norm_verdict
from hpcli.train.checkpoints import Checkpoints
from hpcli.train.engine import Engine, StepResult
from hpcli.train.planted import planted_failure
from hyper_parallel.core.mesh import ParallelMesh


def run(context: RankContext, payload: dict[str, Any]) -> None:
    """Train as ``payload`` says: ``config`` and ``mesh`` as resolved before the start, what the first event reports, the folder of
    ``checkpoints`` (None: there are none) and the one to ``resume`` from."""
    config, mesh = Config.model_validate(payload["config"]), ParallelMesh(**payload["mesh"])
    context.progress(0, "build")
    started = time.perf_counter()
    engine = _engine(config, mesh, payload["device"], context)
    batches = make_batches(config)
    checkpoints = Checkpoints(context, config, mesh, engine, Path(payload["checkpoints"]))
    seen = checkpoints.load(Path(payload["resume"])) if payload["resume"] else 0
    _announce(context, engine, mesh, payload | {"resumed": seen})
    planted = planted_failure()
    losses = []
    stopped = False
    with _asked_to_stop(context) as asked:
        for step in range(seen + 1, config.training.steps + 1):
            began = time.perf_counter()
            context.progress(step, "data")
            if planted and planted.strike(context.rank, step):
                engine.plant_overflow()
            result, tokens = _train_step(context, config, mesh, engine, batches, step, asked())
            losses.append(result.loss)
            if context.rank == 0:
                context.emit(_step_event(step, result, tokens, _learning_rate(config.optimizer, step), began))
            stopped = result.stop and step < config.training.steps
            every = config.logging.norm_table_every
            if step == config.training.steps or (every and step % every == 0):
                context.progress(step, "report")
                if not _norm_table(context, engine, mesh, step):
                    break  # every rank sees the same rows, so all stop here
            if checkpoints.due(step) or (stopped and checkpoints.wanted):
                context.progress(step, "checkpoint")
                _save(context, checkpoints, step)
            if stopped:
                break
    context.progress(config.training.steps, "finish")
    if context.rank == 0 and not stopped:
        seconds = time.perf_counter() - started
        context.emit(
            {"event": "end", "steps": len(losses), "seconds": seconds, "first_loss": losses[0], "last_loss": losses[-1]}
        )
    engine.close()


def _save(context: RankContext, checkpoints: Checkpoints, step: int) -> None:
    began = time.perf_counter()
    path = checkpoints.save(step)
    if context.rank == 0:
        context.emit({"event": "checkpoint", "step": step, "path": str(path), "seconds": time.perf_counter() - began})


@contextmanager
def _asked_to_stop(context: RankContext) -> Iterator[Callable[[], bool]]:
    """Whether this rank has been asked to end early: by the parent of local ranks, or by the SIGTERM that a launcher sends to
    each process."""
    heard = []
    joined = context.launcher != "local" and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True)) if joined else None
    try:
        yield lambda: bool(heard) or context.stop_requested
    finally:
        if joined:
            signal.signal(signal.SIGTERM, before)


def _engine(config: Config, mesh: ParallelMesh, device: str, context: RankContext) -> Engine:
    import hyper_parallel
    from hpcli.train.torch_engine import TorchEngine

    hyper_parallel.init(
        config.platform,
        device,
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout_seconds=context.timeout_seconds,
        strict_dtypes=config.device_options.strict_dtypes,
    )
    return TorchEngine(config, mesh, device)


def _announce(context: RankContext, engine: Engine, mesh: ParallelMesh, payload: dict[str, Any]) -> None:
    here = {
        "rank": context.rank,
        "host": context.host,
        "device": payload["device"],
        "coordinates": _coordinates(mesh, context.rank),
    }
    ranks = engine.gather(here)
    if context.rank == 0:
        resumed = {"resumed_from_step": payload["resumed"]} if payload["resume"] else {}
        start = {"event": "start", **payload["start"], **resumed}
        context.emit({**start, "parameters": engine.parameter_count, "ranks": ranks})


def _train_step(
    context: RankContext, config: Config, mesh: ParallelMesh, engine: Engine, batches: Batches, step: int, stop: bool
) -> tuple[StepResult, int]:
    share = batches.share(step, mesh.data_parallel_rank(context.rank), mesh.data_parallel_size)
    tokens = batches.valid_tokens(step)
    lr = _learning_rate(config.optimizer, step)
    micro_batches = share.split(config.training.micro_batch_size or len(share.inputs))
    return engine.step(micro_batches, tokens, lr, lambda phase: context.progress(step, phase), stop), tokens


def _step_event(step: int, result: StepResult, tokens: int, lr: float, began: float) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    return {
        "event": "step",
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "clip_coefficient": result.clip_coefficient,
        "lr": lr,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "skipped": result.skip_reason is not None,
        "skip_reason": result.skip_reason,
        **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
    }


def _norm_table(context: RankContext, engine: Engine, mesh: ParallelMesh, step: int) -> bool:
    """Show what every rank holds, gathered from each of them; False where they hold different norms."""
    row = {"rank": context.rank, "host": context.host, "coordinates": _coordinates(mesh, context.rank)}
    rows = engine.gather(row | engine.rank_row())
    if context.rank == 0:
        context.emit({"event": "norm_table", "step": step, "rows": rows})
    agree, _ = norm_verdict(rows)
    return agree


def _coordinates(mesh: ParallelMesh, rank: int) -> dict[str, int]:
    position = mesh.coordinates(rank)
    return {axis: position[axis] for axis in mesh.active_axes}


def _learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """Linear warm-up over ``warmup_steps``, then constant."""
    return optimizer.lr * min(1.0, step / max(optimizer.warmup_steps, 1))
