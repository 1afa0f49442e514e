"""The lines that open a run: what is trained, where, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcli.report.formats import count_text


def header_lines(event: Mapping[str, Any]) -> Iterator[str]:
    """The text of a ``start`` event. Whatever the event lacks is left out."""
    yield f"training {event.get('config_file')}" if event.get("config_file") else "training"
    rows = {
        "model": _model(event),
        "mesh": _mesh(event),
        "dtypes": ", ".join(f"{name} {dtype}" for name, dtype in (event.get("dtypes") or {}).items()),
        "device": _device(event),
        "work": _work(event),
        "output": str(event.get("output") or ""),
    }
    for name, text in rows.items():
        if text:
            yield f"  {name:<7} {text}"
    if event.get("resumed_from"):
        yield f"  resumes {event['resumed_from']}, after step {event.get('resumed_from_step')}"
    for notice in event.get("notices") or ():
        yield f"  note    {notice}"


def mesh_text(mesh: Mapping[str, int], world_size: int) -> str:
    """``dp_replicate 2 x dp_shard 4``: the axes of more than one rank. Expert parallelism is no axis but a part of ``dp_shard``."""
    experts = f" (ep {mesh['ep']})" if mesh.get("ep", 1) > 1 else ""
    axes = " x ".join(
        f"{axis} {size}{experts if axis == 'dp_shard' else ''}" for axis, size in mesh.items() if size > 1 and axis != "ep"
    )
    return f"{axes} = {count_text(world_size, 'rank')}" if axes else count_text(world_size, "rank")


def _model(event: Mapping[str, Any]) -> str:
    parameters = event.get("parameters")
    size = "" if parameters is None else count_text(parameters, "parameter")
    return ", ".join(part for part in (event.get("model"), size) if part)


def _mesh(event: Mapping[str, Any]) -> str:
    hosts = list(
        dict.fromkeys(str(rank.get("host")) for rank in event.get("ranks") or () if rank.get("host"))
    )
    text = mesh_text(event.get("mesh") or {}, int(event.get("world_size") or 1))
    if not hosts:
        return text
    return (
        f"{text} on {hosts[0]}" if len(hosts) == 1 else f"{text} on {len(hosts)} hosts: {_shortened(hosts)}"
    )


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ... {names[-1]}"


def _device(event: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (event.get("versions") or {}).items())
    device = str(event.get("device") or "")
    return f"{device} ({versions})" if device and versions else device or versions


def _work(event: Mapping[str, Any]) -> str:
    steps, tokens = event.get("steps"), event.get("tokens_per_step")
    parts = [
        "" if steps is None else count_text(steps, "step"),
        "" if tokens is None else f"{count_text(tokens, 'token')} a step",
    ]
    return ", ".join(part for part in parts if part)
