"""Norm and clip of FSDP2 gradients on two ranks: what they cost beside the least possible and beside torch's. And, on four ranks, of
parameters on several mesh axes and meshes, beside what is written by hand with torch's functions.

Processor time, minima over many alternating calls: on a busy machine the only figure that says something. The floor is
one pass that reads a flat buffer of the same size, one that reads and writes it, and one gather.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bench.results import Result, progress, seconds
from hpcli.launch import RankServer

RANKS = 2
MESH_RANKS = 4
MESH_REPETITIONS = 30
OFFLOADED = 1000
CASES = (
    # name, parameters, shape of each, repetitions of ours, of torch's
    ("1,000 of 64x64", 1000, (64, 64), 60, 15),
    ("10 of 64x64", 10, (64, 64), 60, 30),
    ("100 of 64x64", 100, (64, 64), 60, 30),
    ("5,000 of 64x64", 5000, (64, 64), 25, 0),
    ("10 of 10M elements", 10, (1000, 1000), 25, 15),
)


def measure() -> list[Result]:
    minima: dict[str, dict[str, float]] = defaultdict(dict)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            progress(f"norm: {event['text']}")
        else:
            known = minima[event["case"]]
            for name, value in event["seconds"].items():
                known[name] = min(value, known.get(name, value))

    with RankServer() as server:
        payload = {"cases": CASES}
        server.run("bench.norm_ranks:run", payload, RANKS, timeout_seconds=300, on_event=on_event)
        meshes = {"repetitions": MESH_REPETITIONS}
        server.run("bench.norm_mesh_ranks:run", meshes, MESH_RANKS, timeout_seconds=300, on_event=on_event)
    progress(f"norm: {OFFLOADED:,} of 64x64, offloaded, on {RANKS} ranks of the simulated NPU")
    with RankServer("sim-npu") as server:
        payload = {"count": OFFLOADED, "repetitions": 2 * MESH_REPETITIONS}
        server.run("bench.norm_offload_ranks:run", payload, RANKS, timeout_seconds=300, on_event=on_event)
    results = []
    for case, *_ in sorted(CASES, key=lambda row: row[1] * row[2][0] * row[2][1]):
        results += _results(case, minima.pop(case))
    for case, least in minima.items():
        other, label = (least["by_hand"], "by mesh") if "by_hand" in least else (least["torch"], "torch")
        ratio = other / least["ours"]
        results.append(Result("norm", case, seconds(least["ours"]), f"{label} {seconds(other)}", ratio, "x", 3.0))
    return results


def _results(case: str, least: dict[str, float]) -> list[Result]:
    def line(what: str, ours: str, theirs: str, target: float | None, at_least: bool) -> Result:
        mine, other = least[ours], least[theirs]
        ratio = other / mine if at_least else mine / other
        label = {"floor": "floor", "torch": "torch", "torch_first": "torch", "torch_own": "torch"}[theirs]
        compared = f"{label} {seconds(other)}"
        return Result("norm", f"{case}{what}", seconds(mine), compared, ratio, "x", target, at_least)

    floor_target = {"1,000 of 64x64": 2.0, "10 of 10M elements": 1.2}.get(case)
    results = [line("", "ours", "floor", floor_target, at_least=False)]
    if "torch" in least:
        results.append(line("", "ours", "torch", 8.0 if case.startswith("1,000") else None, at_least=True))
    if "torch_first" in least:
        results.append(line(", first call", "ours_first", "torch_first", 200.0, at_least=True))
    if "torch_own" in least:
        results.append(line(", no shared buffer", "ours_own", "torch_own", 3.0, at_least=True))
    if "torch_plain" in least:
        mine, other = least["ours_plain"], least["torch_plain"]
        results.append(
            Result("norm", f"{case}, plain tensors", seconds(mine), f"torch {seconds(other)}", other / mine, "x", 3.0)
        )
    return results
