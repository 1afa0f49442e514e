"""What ``hpcli plan`` predicts beside what real CPU ranks hold, keep, send and allocate: six layouts on 4 and 8 ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.results import Result, progress
from hpcli.config.load import load_config
from hpcli.config.overrides import Override
from hpcli.config.validate import ResolvedConfig, resolve_config
from hpcli.launch import RankServer
from hpcli.plan.activations import FakeRuns
from hpcli.plan.communication import traffic
from hpcli.plan.estimate import Limits, make_plan
from hpcli.plan.memory import SHARDS, rank_memory
from hpcli.plan.pipeline import pipeline_of
from hpcli.plan.shards import held_by
from hpcli.report.formats import bytes_text

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "dist" / "rank_programs"
LAYOUTS = ("fsdp4", "hsdp2x4", "tp2_sp_fsdp4", "pp4_interleaved_fsdp2", "moe_ep4", "fsdp8_offload")


def measure() -> list[Result]:
    sys.path.insert(0, str(PROGRAMS))  # the server copies sys.path, so the ranks find the programs too
    results = []
    with RankServer() as server:
        for name in LAYOUTS:
            progress(f"plan: {name}")
            loaded = load_config(ROOT / "examples" / "configs" / f"{name}.yaml", [Override("device=cpu")])
            resolved = resolve_config(loaded, ranks=None)
            seen = {what: _on_ranks(server, what, resolved) for what in ("held", "saved", "collectives", "peak")}
            results += _compare(name, resolved, seen)
    return results


def _on_ranks(server: RankServer, what: str, resolved: ResolvedConfig) -> list[Any]:
    mesh = {axis: getattr(resolved.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "ep", "tp")}
    payload = {"program": f"plan_programs:{what}", "arguments": {"config": resolved.config.model_dump(), "mesh": mesh}}
    found: dict[int, Any] = {}
    server.run(
        "harness:call",
        payload,
        resolved.world_size,
        timeout_seconds=120,
        on_event=lambda event: found.update({event["rank"]: event["result"]}),
        on_output=lambda rank, line: None,  # torch's profiler talks
    )
    return [found[rank] for rank in range(resolved.world_size)]


def _compare(name: str, resolved: ResolvedConfig, seen: dict[str, list[Any]]) -> list[Result]:
    """Sums over all ranks, and of the worst moment the rank that needs most."""
    config, mesh, runs = resolved.config, resolved.mesh, FakeRuns()
    ranks = range(mesh.world_size)
    memory = [rank_memory(config, mesh, rank) for rank in ranks]
    shards = sum(getattr(one, kind) for one in memory for kind in SHARDS)
    held = sum(sum(one.values()) for one in seen["held"])
    saved = sum(runs.stage(config, mesh, stage.layers).saved for rank in ranks for stage in held_by(config, mesh, rank))
    kept = sum(one["saved"] for one in seen["saved"])
    pipeline = pipeline_of(config, mesh)
    sent = [one for rank in ranks for one in traffic(config, mesh, rank, pipeline, runs)]
    count, counted = sum(one.times for one in sent), sum(times for rank in seen["collectives"] for *_, times in rank)
    volume = sum(one.volume for one in sent)
    moved = sum(size * times for rank in seen["collectives"] for _, _, size, times in rank)
    needs = make_plan(config, mesh, Limits(0, 0, 8), runs).worst
    whole = needs.device + needs.host
    most = max(one["peak"] for one in seen["peak"]) + needs.memory.parameters + needs.memory.optimizer_state
    return [
        _result(name, "shards", bytes_text(shards), bytes_text(held), shards / held, 0),
        _result(name, "activations", bytes_text(saved), bytes_text(kept), saved / kept, 5),
        _result(name, "collectives", f"{count:,}", f"{counted:,}", count / counted, 0),
        _result(name, "bytes sent", bytes_text(volume), bytes_text(moved), volume / moved, 0),
        Result("plan", f"{name}: worst moment", bytes_text(whole), f"ranks {bytes_text(most)}", whole / most, "x"),
    ]


def _result(layout: str, what: str, predicted: str, measured: str, ratio: float, percent: float) -> Result:
    return Result("plan", f"{layout}: {what}", predicted, f"ranks {measured}", 100 * abs(ratio - 1), "% off", percent, False)
