"""The plan as headings, lines, tables and pictures, whatever they are written in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hpcli.plan.groups import drawing
from hpcli.report.formats import bytes_text, count_text, ranks_text
from hpcli.report.header import mesh_text
from hyper_parallel.core.mesh import ParallelMesh
from hyper_parallel.core.pipeline_parallel import Timeline

NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "main_gradients": "main gradients",
    "optimizer_state": "optimizer state",
    "working_set": "unsharded working set",
    "activations": "activations",
    "temporary": "temporary tensors",
    "buffers": "communication buffers",
}
MOST_DRAWN_RANKS = 64
MOST_CLASSES = 8
MOST_REMEDIES = 8
MOST_DRAWN_STEPS = 2000
SMALL = 0.1
"""Bars are shares of the device's memory; of the total where that is smaller than this share, or does not fit."""


class Block(NamedTuple):
    """A part of the report: a heading over lines, a table or a picture.

    Attributes:
        rows: of a table, the first one its head; numbers are set to the right.
        bars: for each row of the table behind the head, the share of the whole that it is, or none.
        picture: a pipeline's timeline.
    """

    heading: str
    lines: list[str]
    rows: Sequence[list[str]] = ()
    bars: Sequence[float] = ()
    drawn: Sequence[str] = ()
    picture: Timeline | None = None


def verdict_line(told: Mapping[str, Any]) -> str:
    """Whether it fits, and by how much not."""
    needs, limits = told["needs"], told["limits"]
    device, host = needs["device"], needs["host"]
    if told["fits"]:
        enough = f"the fullest device needs {bytes_text(device)} of {bytes_text(limits['device'])}"
        return f"FITS: {enough}" + (f", and its host {bytes_text(host)} of {bytes_text(limits['host'])}" if host else "")
    reasons = []
    if device > limits["device"]:
        reasons.append(
            f"the fullest device needs {bytes_text(device)}, {bytes_text(device - limits['device'])} more than its {bytes_text(limits['device'])}"
        )
    if host > limits["host"]:
        reasons.append(
            f"its host needs {bytes_text(host)}, {bytes_text(host - limits['host'])} more than its {bytes_text(limits['host'])}"
        )
    return f"DOES NOT FIT: {'; '.join(reasons)}"


def blocks(told: Mapping[str, Any], timeline: Timeline | None) -> Iterator[Block]:
    """The report, from top to bottom."""
    yield Block("", _head(told))
    yield _mesh(told)
    yield _memory(told)
    if len(_alike(told["classes"])) > 1:
        yield _classes(told)
    if told["remedies"]:
        yield _remedies(told)
    if timeline is not None:
        yield _pipeline(told, timeline)
    yield _communication(told)
    yield Block("Assumed", list(told["assumptions"]))


def _head(told: Mapping[str, Any]) -> list[str]:
    hosts = -(-told["world_size"] // told["ranks_per_host"])
    dtypes = ", ".join(f"{name} {dtype}" for name, dtype in told["dtypes"].items())
    batches = count_text(told["micro_batches"], "micro-batch", "micro-batches")
    return [
        f"model     {told['model']}, {told['parameters']:,} parameters, on {told['platform']}",
        f"mesh      {mesh_text(told['mesh'], told['world_size'])}, {count_text(hosts, 'host')} of up to {told['ranks_per_host']}",
        f"batch     {batches} of {told['micro_batch_size']} x {told['seq_length']:,} tokens a step on each data-parallel rank",
        f"dtypes    {dtypes}",
        *(f"note      {notice}" for notice in told["notices"]),
    ]


def _mesh(told: Mapping[str, Any]) -> Block:
    rows = [["axis", "ranks", "groups", "the first", "link", "what they share"]]
    for axis in told["axes"]:
        first = ranks_text(axis["first"], most=4) if axis["ranks"] <= 64 else f"ranks {axis['first'][0]}, {axis['first'][1]}, ..."
        rows.append([axis["axis"], f"{axis['ranks']:,}", f"{axis['groups']:,}", first, axis["link"], axis["shares"]])
    drawn: Sequence[str] = ()
    if 1 < told["world_size"] <= MOST_DRAWN_RANKS:
        drawn = drawing(ParallelMesh(**told["mesh"]))
    return Block("Mesh", [] if told["axes"] else ["one rank"], rows if told["axes"] else (), (), drawn)


def _memory(told: Mapping[str, Any]) -> Block:
    shown, limits = told["shown"], told["limits"]
    total = shown["device_total"]
    whole = limits["device"] if limits["device"] > total > SMALL * limits["device"] else total
    rows, bars = [["kind", "on the device", "on the host"]], []
    for kind, name in NAMES.items():
        device, host = shown["device"][kind], shown["host"].get(kind, 0)
        rows.append([name, bytes_text(device) if device else "-", bytes_text(host) if host else "-"])
        bars.append(device / whole)
    if shown["never_at_once"]:
        rows.append(["gradients come as activations go", f"-{bytes_text(shown['never_at_once'])}", "-"])
        bars.append(0.0)
    rows.append(["at the worst moment", bytes_text(shown["device_total"]), bytes_text(shown["host_total"]) if shown["host_total"] else "-"])
    bars.append(shown["device_total"] / whole)
    room = limits["device"] - shown["device_total"]
    lines = [
        f"rank {shown['rank']}" + f" and {count_text(shown['ranks'] - 1, 'other')} like it" * (shown["ranks"] > 1)
        + f" ({place(shown, told['mesh'])}); a full bar is {bytes_text(whole)}",
        f"headroom {bytes_text(room)} of {bytes_text(limits['device'])}" if room >= 0 else f"{bytes_text(-room)} too much",
    ]
    if told["needs"]["host"]:
        each = min(told["ranks_per_host"], told["world_size"])
        lines.append(f"a host with {count_text(each, 'rank')} needs {bytes_text(told['needs']['host'])} of {bytes_text(limits['host'])}")
    if told["drawing_on_host"] > limits["host"]:
        lines.append(
            f"NOTE: hpcli train draws a rank's stages whole before it cuts them, {bytes_text(told['drawing_on_host'])} on a host here"
        )
    return Block("Memory of a rank", lines, rows, bars)


def place(ranks: Mapping[str, Any], mesh: Mapping[str, int]) -> str:
    """Where the ranks of a class are on the mesh."""
    parts = []
    if len(ranks["pp"]) < mesh["pp"]:
        parts.append("pp " + ranks_text(ranks["pp"], 4).partition(" ")[2])
    for axis in ("dp_shard", "tp"):
        start, stop = ranks[axis]
        if stop - start < mesh[axis]:
            parts.append(f"{axis} {start}" + f"-{stop - 1}" * (stop - start > 1))
    return ", ".join(parts) or "everywhere on the mesh"


def _classes(told: Mapping[str, Any]) -> Block:
    rows = [["ranks", "where", "device", "host"]]
    classes = _alike(told["classes"])
    for ranks in classes[:MOST_CLASSES]:
        host = bytes_text(ranks["host_total"]) if ranks["host_total"] else "-"
        rows.append([f"{ranks['ranks']:,}", place(ranks, told["mesh"]), bytes_text(ranks["device_total"]), host])
    left = len(classes) - MOST_CLASSES
    return Block("Classes of ranks", [f"the fullest {MOST_CLASSES} of {len(classes)}"] if left > 0 else [], rows)


def _alike(classes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Classes that are neighbours on ``dp_shard`` and look alike in print are one."""
    merged: list[dict[str, Any]] = []
    for one in sorted(classes, key=lambda ranks: (ranks["pp"], ranks["tp"], ranks["dp_shard"])):
        last = merged[-1] if merged else None
        if last and all(_printed(last, key) == _printed(one, key) for key in ("device_total", "host_total", "pp", "tp")):
            last["ranks"] += one["ranks"]
            last["dp_shard"] = [last["dp_shard"][0], one["dp_shard"][1]]
        else:
            merged.append(dict(one))
    return sorted(merged, key=lambda ranks: -ranks["device_total"])


def _printed(ranks: Mapping[str, Any], key: str) -> object:
    return bytes_text(ranks[key]) if key.endswith("total") else ranks[key]


def _remedies(told: Mapping[str, Any]) -> Block:
    rows = [["change", "device", "host", ""]]
    for remedy in told["remedies"][:MOST_REMEDIES]:
        host = bytes_text(remedy["host"]) if remedy["host"] else "-"
        rows.append([remedy["text"], bytes_text(remedy["device"]), host, "fits" if remedy["fits"] else "does not fit"])
    return Block("What would need less" if told["fits"] else "What would help most", [], rows)


def _pipeline(told: Mapping[str, Any], timeline: Timeline) -> Block:
    pipeline = told["pipeline"]
    stages = count_text(pipeline["stages"], "stage")
    batches = count_text(pipeline["micro_batches"], "micro-batch", "micro-batches")
    peak = max(pipeline["peak_in_flight"])
    lines = [
        f"{pipeline['schedule']}, {stages}, {batches}: idle {100 * pipeline['bubble_share']:.1f} % of the ranks' time",
        f"micro-batches in flight, counted per stage: at most {peak}, on pipeline rank {pipeline['peak_in_flight'].index(peak)}",
    ]
    drawable = sum(map(len, timeline.spans)) <= MOST_DRAWN_STEPS
    if not drawable:
        lines.append("too many steps to be drawn")
    return Block("Pipeline", lines, (), (), (), timeline if drawable else None)


def _communication(told: Mapping[str, Any]) -> Block:
    rows = [["what for", "collective", "axis", "ranks", "times", "bytes each", "a step"]]
    total: dict[str, int] = {}
    for one in sorted(told["communication"], key=lambda one: -one["volume"]):
        total[one["link"]] = total.get(one["link"], 0) + one["volume"]
        rows.append(
            [
                one["purpose"],
                one["collective"],
                one["axis"],
                f"{one['ranks']:,}",
                f"{one['times']:,}",
                bytes_text(one["bytes"]),
                bytes_text(one["volume"]),
            ]
        )
    if len(rows) == 1:
        return Block("Communication of a step", ["a single rank sends nothing"])
    volume = sum(total.values())
    norm = sum(one["volume"] for one in told["communication"] if one["purpose"] == "gradient norm")
    lines = [
        f"of rank {told['shown']['rank']}; bytes are those of the larger buffer of a collective",
        ", ".join(f"{name} {bytes_text(size)}" for name, size in sorted(total.items())) + " a step",
        f"the gradient norm takes one all-gather: {bytes_text(norm)}, {100 * norm / volume:.2g} % of the bytes",
    ]
    return Block("Communication of a step", lines, rows)
