"""The parent's part of check-norm: references first, then one layout after the other on one rank server."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpcli.check.evidence import Degrees, Expected, expected_witness
from hpcli.check.layouts import Layout
from hpcli.check.verdict import Verdict, failed, judge
from hpcli.launch import RankFailure, RankServer
from hpcli.train.precision import precision_policy
from hyper_parallel.core.pipeline_layout import ZERO_BUBBLE_SCHEDULES

RANK_PROGRAM = "hpcli.check.rank_program:run"
REFERENCE_PROGRAM = "hpcli.check.reference:run"
WARM_UP = "hpcli.check.warm:warm"
REFERENCE_RANKS = 2

Progress = Callable[[int, int, str], None]


def check(
    layouts: Sequence[Layout],
    *,
    device: str = "cpu",
    faults: Sequence[str | None] = (),
    timeout_seconds: float = 60.0,
    progress: Progress = lambda done, total, what: None,
) -> Iterator[Verdict]:
    """The verdict on each layout, as soon as it is known.

    Args:
        faults: what is planted into the ranks, layout by layout; nothing where there is no entry.
        progress: called with how many layouts are done, how many there are, and what is being done.

    Raises:
        LaunchError: the ranks cannot be started at all.
    """
    warm_up = WARM_UP if device == "cpu" else None
    with RankServer(device, warm_up=warm_up) as server, tempfile.TemporaryDirectory(prefix="hpcli-check-") as folder:
        progress(0, len(layouts), "reference")
        references = _references(server, layouts, device, Path(folder), timeout_seconds)
        for number, (layout, fault) in enumerate(zip_longest(layouts, faults[: len(layouts)])):
            progress(number, len(layouts), layout.name)
            began = time.perf_counter()
            reference = references[number]
            if "error" in reference:
                yield failed(layout.name, f"no reference: {reference['error']}", 0.0)
                continue
            expected, degrees = _expected(layout, reference["path"], reference["loss"])
            facts: list[dict[str, Any]] = []
            try:
                server.run(
                    RANK_PROGRAM,
                    _payload(layout, device, fault, reference["path"]),
                    layout.resolved.world_size,
                    timeout_seconds=timeout_seconds,
                    on_event=facts.append,
                )
            except RankFailure as failure:
                yield failed(layout.name, str(failure), time.perf_counter() - began)
            else:
                yield judge(layout.name, facts, expected, degrees, time.perf_counter() - began)
        progress(len(layouts), len(layouts), "")


def _references(
    server: RankServer, layouts: Sequence[Layout], device: str, folder: Path, timeout_seconds: float
) -> list[dict[str, Any]]:
    """What became of every layout's reference: its file, and its loss or an error. Layouts that train the same model on the same
    split of the batch share one."""
    entries: dict[str, dict[str, Any]] = {}
    keys = []
    for layout in layouts:
        config = layout.resolved.config.model_dump(mode="json")
        split = layout.resolved.mesh.data_parallel_size
        keys.append(json.dumps([config["model"], config["training"], split], sort_keys=True))
        entries.setdefault(keys[-1], {"config": config, "data_parallel": split})
    told: dict[int, dict[str, Any]] = {}
    server.run(
        REFERENCE_PROGRAM,
        {"layouts": list(entries.values()), "folder": str(folder), "device": device},
        min(REFERENCE_RANKS, len(entries)),
        timeout_seconds=timeout_seconds,
        on_event=lambda event: told.update({event["layout"]: event}),
    )
    numbers = {key: number for number, key in enumerate(entries)}
    return [{**told[numbers[key]], "path": folder / f"{numbers[key]}.npz"} for key in keys]


def _payload(layout: Layout, device: str, fault: str | None, reference: Path) -> dict[str, Any]:
    return {
        "config": layout.resolved.config.model_dump(mode="json"),
        "mesh": asdict(layout.resolved.mesh),
        "device": device,
        "fault": fault,
        "reference": str(reference),
    }


def _expected(layout: Layout, reference: Path, loss: float) -> tuple[Expected, Degrees]:
    import numpy as np

    config, mesh = layout.resolved.config, layout.resolved.mesh
    with np.load(reference, allow_pickle=False) as arrays:
        squares = {
            key.removeprefix("right/"): float(np.square(arrays[key]).sum())
            for key in arrays.files
            if key.startswith("right/")
        }
    degrees = Degrees(
        pp=mesh.pp,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        ep=mesh.ep,
        tp=mesh.tp,
        zero_bubble=mesh.pp > 1 and config.parallelism.pipeline_parallel_schedule in ZERO_BUBBLE_SCHEDULES,
        reduce_dtype=precision_policy(config).resolved_reduce_dtype,
    )
    if config.model.tie_embeddings:
        squares["head.weight"] = 0.0  # the other name of the embedding
    witness = expected_witness(degrees) if layout.low_precision or mesh.tp > 1 else {}
    coarse = degrees.reduce_dtype != "float32"  # gradients are clipped in the dtype that they are reduced in
    expected = Expected(
        squares,
        loss,
        *_tolerances(layout, degrees),
        witness,
        max_norm=config.training.max_norm,
        clip_tolerance=1e-2 if coarse else 1e-5,
        norm_type=config.training.norm_type,
    )
    return expected, degrees


def _tolerances(layout: Layout, degrees: Degrees) -> tuple[float, float, float]:
    """How far the norm (relative) and a gradient shard (relative to itself, and to the whole gradient) may be off.

    In float32 only the order of sums differs. In low precision the reference replays the layout's split of the batch: again only the order
    of sums differs, unless tensor or expert parallelism also cut the matrices, whose products are then rounded elsewhere.
    """
    if not layout.low_precision:
        return 1e-6, 1e-5, 1e-7
    if degrees.tp > 1 or degrees.ep > 1:
        return 2e-2, 1e-1, 1e-2
    if degrees.reduce_dtype == "float32":
        return 1e-5, 1e-4, 1e-6
    return 5e-3, 2e-2, 1e-3


def all_hold(verdicts: Sequence[Verdict]) -> bool:
    """Whether something was checked and all of it holds."""
    return bool(verdicts) and all(verdict.holds for verdict in verdicts) and not any(
        math.isnan(verdict.norm) for verdict in verdicts
    )
