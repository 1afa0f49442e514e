"""Whatever the layout: the norm is that of the whole gradients in float64, the same bits on every rank, and every shard is clipped.

A layout is drawn here, in the parent, as plain data; NumPy in float64 says what must come out. The ranks (see
``rank_programs/any_layout_programs.py``) take fifty layouts in one run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

RANKS = 4
IN_ONE_RUN = 50
LAYOUTS = 200
LONG_LAYOUTS = int(os.environ.get("HP_EXAMPLES", "20000")) // 4  # 5,000 in `make test-all`

MESHES = [[4], [2, 2], [1, 4], [4, 1], [1, 2, 2], [2, 1, 2], [2, 2, 1], [1, 1, 4]]
NORM_TYPES = [2, 2.0, "2", 1, 0.5, "0.5", 3, "3", 0, math.inf, -math.inf, "inf", "-inf"]
BITS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def draw_layout(seed: int) -> dict[str, Any]:
    """A layout: meshes over the ranks, and parameters with what each rank holds of their gradients."""
    rng = random.Random(seed)
    sizes = rng.choice(MESHES)
    names = ["a", "b", "c"][: len(sizes)]
    stages = 1
    if len(sizes) > 1 and sizes[0] > 1 and rng.random() < 0.4:
        names[0], stages = "pp", sizes[0]
    meshes = [[sizes, names]]
    if stages == 1 and rng.random() < 0.3:  # the same ranks, otherwise cut: experts beside dense parameters
        other = rng.choice([mesh for mesh in MESHES if len(mesh) > 1])
        meshes.append([other, ["dpm", "ep", "etp"][: len(other)]])
    parameters = [_draw_parameter(rng, meshes, stages) for _ in range(rng.randint(1, 5))]
    spread = [p for p in parameters if p["axes"] is not None]
    on_other = any(p["root"] == 1 for p in spread)
    whole = any(math.prod(_sizes(meshes[p["root"]], p["axes"])) == RANKS for p in spread)
    pass_mesh = stages > 1 or not spread or (on_other and not whole) or rng.random() < 0.3
    layout = {
        "seed": seed,
        "meshes": meshes,
        "pass_mesh": pass_mesh,
        "norm_type": rng.choice(NORM_TYPES),
        "max_norm": rng.choice([0.1, 1.0, 1.0, 1e3, math.inf]),
        "parameters": parameters,
    }
    generator = np.random.default_rng(seed)
    for parameter in parameters:
        _fill(parameter, meshes[parameter["root"]], generator, rng)
    return layout


def _draw_parameter(rng: random.Random, meshes: list[Any], stages: int) -> dict[str, Any]:
    root = rng.randrange(len(meshes))
    names = meshes[root][1]
    inner = [name for name in names if name != "pp"]
    axes = None
    if rng.random() < 0.8:
        axes = [name for name in inner if rng.random() < 0.75] or inner
    shape = [rng.choice([1, 2, 3, 4, 5, 7, 8, 0 if rng.random() < 0.2 else 6]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]
    dims = [f"S{dim}" for dim in range(len(shape))]
    placements = [rng.choice(["R", *dims, *dims, *(["P"] if rng.random() < 0.4 else [])]) for _ in axes or ()]
    if axes and len(axes) == 2 and shape and rng.random() < 0.25:  # FSDP over tensor parallel
        placements = [f"S0/{_sizes(meshes[root], axes[1:])[0]}", "S0"]
    if rng.random() < 0.1:
        placements = ["A" if placement == "P" else placement for placement in placements]
    replicated = [a for a in names if a != "pp" and (axes is None or a not in axes or placements[axes.index(a)] == "R")]
    replicated = [a for a in replicated if _sizes(meshes[root], [a])[0] > 1]
    shared = []
    stage: int | None = rng.randrange(stages)
    if rng.random() < 0.25 and not set(placements) & {"P", "A"}:
        if stages > 1:
            shared.append("pp")
        shared += [axis for axis in replicated if rng.random() < 0.6]
        if "pp" in shared:
            stage = None  # on all
    dtype = rng.choice(["float32", "float32", "float32", "bfloat16", "float16", "float64"])
    main_grad = rng.random() < 0.15
    return {
        "root": root,
        "stage": stage,
        "axes": axes,
        "shape": shape,
        "placements": placements,
        "dtype": dtype,
        "gradient_dtype": rng.choice(["float32", "float64"]) if main_grad else dtype,
        "main_grad": main_grad,
        "shared": shared,
        "frozen": rng.random() < 0.1,
        "twice": rng.random() < 0.1,
    }


def _fill(parameter: dict[str, Any], mesh: Any, generator: np.random.Generator, rng: random.Random) -> None:
    """Draw the gradient, in parts where ranks are to add it up, and cut it into what each rank holds (None: no gradient)."""
    shape, summed = parameter["shape"], _summed_axes(parameter)
    bits = BITS[parameter["gradient_dtype"]]
    scale = 2.0 ** rng.choice([0, 0, 0, -6, 5] if parameter["gradient_dtype"] == "float16" else [0, 0, 0, -40, 30])
    parts = {}
    for where in itertools.product(*(range(size) for size in _sizes(mesh, summed))):
        if bits < 24 or summed:  # whole numbers whose sums fit into 8 bits
            part = generator.integers(-60, 61, shape).astype(float)
        else:
            part = generator.standard_normal(shape).astype(np.float32 if bits == 24 else np.float64).astype(float)
        parts[where] = np.asarray(part * scale)
    lacking = rng.random() < 0.25
    # a Partial gradient is on all ranks or on none: peers that disagree are told so
    lacking_parts = {where for where in parts if lacking and (not parameter["shared"] or rng.random() < 0.5)} if summed else set()
    lacking_ranks = {rank for rank in range(RANKS) if lacking and not summed and rng.random() < 0.5}
    parameter["local"], parameter["local_shape"], parameter["piece"] = [], [], []
    for rank in range(RANKS):
        at = dict(zip(mesh[1], np.unravel_index(rank, mesh[0]), strict=True))
        if parameter["stage"] is not None and "pp" in at and at["pp"] != parameter["stage"]:
            parameter["local"].append(None)
            parameter["local_shape"].append(None)
            parameter["piece"].append(None)
            continue
        where = tuple(int(at[axis]) for axis in summed)
        piece = _cut(np.arange(math.prod(shape)).reshape(shape), parameter, mesh, at)
        values = parts[where].reshape(-1)[piece]
        lacks = where in lacking_parts or rank in lacking_ranks
        parameter["local"].append(None if lacks else values.reshape(-1).tolist())
        parameter["local_shape"].append(list(values.shape))
        parameter["piece"].append(piece.reshape(-1).tolist())


def _summed_axes(parameter: dict[str, Any]) -> list[str]:
    pairs = zip(parameter["axes"] or (), parameter["placements"], strict=True)
    return [*parameter["shared"], *(axis for axis, placement in pairs if placement in "PA")]


def _cut(whole: np.ndarray, parameter: dict[str, Any], mesh: Any, at: dict[str, Any]) -> np.ndarray:
    """What a rank holds. A shard of pieces is cut after the shard that makes the pieces."""
    cuts = list(zip(parameter["axes"] or (), parameter["placements"], strict=True))
    for axis, placement in sorted(cuts, key=lambda cut: "/" in cut[1]):
        if placement.startswith("S"):
            dim, size = int(placement[1:].partition("/")[0]), _sizes(mesh, [axis])[0]
            length = -(-whole.shape[dim] // size)
            start = min(int(at[axis]) * length, whole.shape[dim])
            whole = whole.take(range(start, min(start + length, whole.shape[dim])), axis=dim)
    return whole


def _sizes(mesh: Any, axes: Sequence[str]) -> list[int]:
    return [mesh[0][mesh[1].index(axis)] for axis in axes]


class Expected:
    """What NumPy says of a layout, seen from one rank."""

    def __init__(self, layout: dict[str, Any], rank: int) -> None:
        self.scope = _scope(layout, rank)
        counted = [p for p in layout["parameters"] if not p["frozen"]]
        elements = [_elements(p, layout["meshes"][p["root"]], self.scope) for p in counted]
        x = np.abs(np.concatenate([np.zeros(0), *elements]))
        finished = any(p["shared"] for p in layout["parameters"])  # a rank without a gradient may have got one then
        present = [p for p in counted if any(_present(p, layout, r, finished) for r in self.scope)]
        self.dtype = "float64" if any(p["gradient_dtype"] == "float64" for p in present) else "float32"
        self.norm = _norm(x, float(layout["norm_type"]))
        if self.dtype == "float32" and self.norm > LARGEST_FLOAT32:
            self.norm = math.inf
        self.coefficient = 1.0
        if math.isfinite(self.norm) and layout["max_norm"] != math.inf:
            self.coefficient = min(1.0, layout["max_norm"] / (self.norm + 1e-6))


def _scope(layout: dict[str, Any], rank: int) -> list[int]:
    spread = [p for p in layout["parameters"] if p["axes"] is not None]
    if layout["pass_mesh"] or any(p["root"] == 1 for p in spread):
        return list(range(RANKS))
    sizes, names = layout["meshes"][0]
    used = {axis for p in spread for axis in p["axes"]}
    here = np.unravel_index(rank, sizes)
    chosen = tuple(slice(None) if name in used else position for name, position in zip(names, here, strict=True))
    return np.arange(RANKS).reshape(sizes)[chosen].reshape(-1).tolist()


def _elements(parameter: dict[str, Any], mesh: Any, scope: list[int]) -> np.ndarray:
    """Every element of the whole gradient that some rank of the scope holds, once, added up where ranks hold parts."""
    summed = _summed_axes(parameter)
    parts: dict[tuple[int, ...], dict[int, float]] = {}
    for rank in range(RANKS):
        values = parameter["local"][rank]
        if values is not None and (rank in scope or parameter["shared"]):
            at = dict(zip(mesh[1], np.unravel_index(rank, mesh[0]), strict=True))
            part = parts.setdefault(tuple(int(at[axis]) for axis in summed), {})
            part.update(zip(parameter["piece"][rank], values, strict=True))
    total: dict[int, float] = {}
    for part in parts.values():
        for index, value in part.items():
            total[index] = total.get(index, 0.0) + value
    return np.array(list(total.values())) / _averaged_over(parameter, mesh)


def _averaged_over(parameter: dict[str, Any], mesh: Any) -> int:
    pairs = zip(parameter["axes"] or (), parameter["placements"], strict=True)
    return math.prod(_sizes(mesh, [axis for axis, placement in pairs if placement == "A"]))


def _present(parameter: dict[str, Any], layout: dict[str, Any], rank: int, finished: bool) -> bool:
    if finished and parameter["local_shape"][rank] is not None:
        return _finished(parameter, layout["meshes"][parameter["root"]], rank) is not None
    return parameter["local"][rank] is not None


def _norm(x: np.ndarray, p: float) -> float:
    if not len(x):
        return 0.0
    if math.isinf(p):
        return float(x.max() if p > 0 else x.min())
    if p == 0:
        return float(np.count_nonzero(x))
    largest = float(x.max())
    return largest * math.fsum((x / largest) ** p) ** (1 / p) if largest else 0.0


def faults(layout: dict[str, Any], results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Everything that is wrong with what the ranks hold."""
    errors = {result["error"] for result in results if "error" in result}
    if errors:
        yield f"errors: {errors}"
        return
    finished = any(p["shared"] for p in layout["parameters"])
    for rank, result in enumerate(results):
        expected = Expected(layout, rank)
        if {results[other]["norm"].hex() for other in expected.scope} != {result["norm"].hex()}:
            yield f"norms differ: {[r['norm'] for r in results]}"
        if result["norm"] != pytest.approx(expected.norm, rel=1e-7, abs=0):
            yield f"rank {rank}: norm {result['norm']!r}, not {expected.norm!r}"
        if result["dtype"] != f"torch.{expected.dtype}":
            yield f"rank {rank}: the norm is {result['dtype']}, not {expected.dtype}"
        missing = any(values is None for p in layout["parameters"] for values in p["local"])
        if result["differ"] and not missing:
            yield f"rank {rank}: replicas differ: {result['differ']}"
        here = [p for p in layout["parameters"] if p["local_shape"][rank] is not None]
        for index, (parameter, clipped) in enumerate(zip(here, result["gradients"], strict=True)):
            before = parameter["local"][rank]
            if finished:
                before = _finished(parameter, layout["meshes"][parameter["root"]], rank)
            coefficient = 1.0 if parameter["frozen"] else expected.coefficient
            if parameter["gradient_dtype"] == "float16":  # as which it is multiplied
                coefficient = float(np.float16(coefficient))
            bits = BITS[parameter["gradient_dtype"]]
            if (before is None) != (clipped is None):
                yield f"rank {rank}: parameter {index} has {clipped}, not {before}"
            elif before is not None:
                tiny = 2.0**-24 if parameter["gradient_dtype"] == "float16" else 0.0
                tolerance = max(1e-6, 2.0 ** (2 - bits)) if coefficient != 1.0 else 0.0
                if not np.allclose(clipped, np.multiply(before, coefficient), rtol=tolerance, atol=tiny):
                    yield f"rank {rank}: parameter {index} is {clipped}, not {coefficient} times {before}"


def _finished(parameter: dict[str, Any], mesh: Any, rank: int) -> list[float] | None:
    """This rank's gradient after finish_gradients: the sum over those that hold parts of it."""
    if parameter["frozen"]:
        return parameter["local"][rank]
    summed = _summed_axes(parameter)
    chosen = tuple(
        slice(None) if name in summed else position
        for name, position in zip(mesh[1], np.unravel_index(rank, mesh[0]), strict=True)
    )
    parts = [parameter["local"][other] for other in np.arange(RANKS).reshape(mesh[0])[chosen].reshape(-1)]
    there = [part for part in parts if part is not None]
    return (np.sum(there, axis=0) / _averaged_over(parameter, mesh)).tolist() if there else None


def check(on_ranks: Any, layouts: Sequence[dict[str, Any]], tally: Counter[str] | None = None) -> None:
    by_rank = on_ranks("any_layout_programs:clip_each", RANKS, layouts=layouts)
    for index, layout in enumerate(layouts):
        wrong = list(faults(layout, [results[index] for results in by_rank]))
        if wrong:
            lines = "\n  ".join([*wrong, *(f"{key}: {value}" for key, value in layout.items())])
            pytest.fail(f"draw_layout({layout['seed']}):\n  {lines}", pytrace=False)
        if tally is not None:
            tally.update(_kinds(layout))


def _drawn(seed: int) -> list[dict[str, Any]]:
    return [draw_layout(seed * IN_ONE_RUN + index) for index in range(IN_ONE_RUN)]


def _kinds(layout: dict[str, Any]) -> Iterator[str]:
    """What a report counts of a layout."""
    parameters = layout["parameters"]
    placements = {placement[0] for p in parameters for placement in p["placements"]}
    yield "layouts"
    yield f"norm_type {float(layout['norm_type']):g}"
    yield from (f"with {dtype} gradients" for dtype in {p["gradient_dtype"] for p in parameters})
    yield from (f"with placement {placement}" for placement in placements)
    for kind, there in {
        "a pipeline": "pp" in layout["meshes"][0][1],
        "two meshes": len({p["root"] for p in parameters}) > 1,
        "plain tensors beside DTensors": len({p["axes"] is None for p in parameters}) > 1,
        "strided shards": any("/" in placement for p in parameters for placement in p["placements"]),
        "shared parameters": any(p["shared"] for p in parameters),
        "missing gradients": any(v is None for p in parameters for v, s in zip(p["local"], p["local_shape"], strict=True) if s),
        "frozen parameters": any(p["frozen"] for p in parameters),
        "a parameter listed twice": any(p["twice"] for p in parameters),
        "main_grad": any(p["main_grad"] for p in parameters),
    }.items():
        if there:
            yield f"with {kind}"


def _seeds(layouts: int) -> Any:
    options = settings(
        max_examples=-(-layouts // IN_ONE_RUN),
        phases=[Phase.generate],  # the failing layout is one of fifty, and its seed is told: nothing to shrink
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: options(given(seed=st.integers(0, 2**32))(test))


@_seeds(LAYOUTS)
def test_norm_and_clip_of_any_layout(on_ranks, seed):
    check(on_ranks, _drawn(seed))


def test_layouts_that_were_wrong_once(on_ranks):
    check(on_ranks, [draw_layout(seed) for seed in (*range(14828, 14834), 22310, 17616968)])


@pytest.mark.long
def test_norm_and_clip_of_many_layouts(on_ranks):
    """With HP_REPORT=file it also writes what was drawn."""
    tally: Counter[str] = Counter()
    seeds: list[int] = []

    @_seeds(LONG_LAYOUTS)
    def run(seed: int) -> None:
        check(on_ranks, _drawn(seed), tally)
        seeds.append(seed)

    run()
    assert tally["layouts"] >= LONG_LAYOUTS
    if path := os.environ.get("HP_REPORT"):
        counts = {kind: tally[kind] for kind in sorted(tally)}
        report = {"ranks": RANKS, "in_one_run": IN_ONE_RUN, "wrong": 0, "counts": counts, "seeds": seeds}
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
