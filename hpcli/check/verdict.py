"""Whether a layout holds, and what is to be said where it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcli.check.causes import Cause
from hpcli.check.diagnosis import diagnose
from hpcli.check.evidence import Degrees, Evidence, Expected, close

WORST_SHOWN = 4


class Verdict(NamedTuple):
    """One line of the table, and what belongs below it.

    Attributes:
        difference: of the norm from the reference, relative.
        equal: every rank holds the norm in the same bits.
        worst: the parameter whose gradient shard differs most from the reference's, and by how much.
        collectives: issued by one clip.
        seconds: the layout took.
        problems: each thing that does not hold; empty where all does.
        cause: of the problems.
        notes: what differs and may.
        allowed: relative difference of the norm, and of a gradient shard, that still holds.
    """

    layout: str
    norm: float
    difference: float
    equal: bool
    worst: tuple[str, float]
    collectives: int
    seconds: float
    problems: tuple[str, ...]
    cause: Cause | None
    notes: tuple[str, ...] = ()
    allowed: tuple[float, float] = (0.0, 0.0)

    @property
    def holds(self) -> bool:
        return not self.problems


def judge(
    layout: str, facts: Sequence[Mapping[str, Any]], expected: Expected, degrees: Degrees, seconds: float
) -> Verdict:
    """Compare what the ranks told with what must be."""
    evidence = Evidence(facts, expected, degrees)
    problems = tuple(_problems(evidence))
    norm, reference = evidence.norms[0], expected.norm
    return Verdict(
        layout,
        norm,
        abs(norm - reference) / reference if reference else math.inf,
        len(evidence.norm_bits) == 1,
        evidence.worst(),
        max(fact["collectives"] for fact in evidence.facts),
        seconds,
        problems,
        diagnose(evidence) if problems else None,
        tuple(_notes(evidence)),
        (expected.norm_tolerance, expected.relative),
    )


def failed(layout: str, message: str, seconds: float) -> Verdict:
    """The verdict on a layout of which a rank failed."""
    nothing = math.nan
    return Verdict(
        layout, nothing, nothing, False, ("", nothing), 0, seconds, (message,), Cause("rank-failed", "")
    )


def _problems(evidence: Evidence) -> list[str]:
    expected, problems = evidence.expected, []
    if not all(fact["collectives_add_up"] for fact in evidence.facts):
        problems.append("the collectives' self-test failed")
    if not expected.norm > 0:
        problems.append("the reference norm is 0: nothing is proved")
    problems += _data(evidence)
    if len(evidence.norm_bits) > 1:
        problems.append("ranks hold different norms")
    off = [
        (fact["rank"], norm)
        for fact, norm in zip(evidence.facts, evidence.norms, strict=True)
        if not close(norm, expected.norm, expected.norm_tolerance)
    ]
    if off:
        ranks = "every rank" if len(off) == len(evidence.facts) else f"rank {', '.join(str(rank) for rank, _ in off)}"
        problems.append(f"norm on {ranks}: {off[0][1]:.9g}, reference {expected.norm:.9g}")
    if missing := evidence.missing():
        problems.append(f"no gradient: {_named(missing)}")
    if wrong := evidence.wrong():
        shown = "; ".join(_worst_of_classes(wrong))
        problems.append(f"{len(wrong)} gradient shards differ from the reference: {shown}")
    if not close(evidence.loss, expected.loss, expected.loss_tolerance):
        problems.append(f"loss {evidence.loss:.9g}, reference {expected.loss:.9g}")
    for name, right in expected.witness.items():
        found = {fact["witness"][name] for fact in evidence.facts} - {right}
        if found:
            came_out = ", ".join(map(str, sorted(found)))
            problems.append(f"the exact value sent through the reducer ({name}) is {came_out} instead of {right}")
    if clipped := evidence.clipped_wrongly():
        first = clipped[0]
        where = f"{first.name} on rank {first.fact['rank']}"
        problems.append(
            f"{len(clipped)} gradient shards are clipped wrongly: {where} by {first.factor:.6g}, not {first.right:.6g}"
        )
    problems += evidence.misreported()
    other = evidence.of_type()
    if other is not None and not close(*other, 1e-6):
        problems.append(f"norm of type {expected.norm_type:g}: {other[0]:.9g}, that of the ranks' gradients is {other[1]:.9g}")
    changes = evidence.offload_changes()
    if changes and evidence.offload_binds:
        problems.append(f"offload changes {', '.join(changes)}")
    return problems


def _notes(evidence: Evidence) -> list[str]:
    changes = evidence.offload_changes()
    if evidence.offload_binds or not changes:
        return []
    return [f"offload changes {', '.join(changes)}, as it may on this device"]


def _data(evidence: Evidence) -> list[str]:
    positions: dict[str, set[tuple[int, int]]] = {}
    for fact in evidence.facts:
        place = fact["coordinates"]
        positions.setdefault(fact["data"], set()).add((place["dp_replicate"], place["dp_shard"]))
    shared = max((len(places) for places in positions.values()), default=0)
    return [f"{shared} data-parallel ranks hold the same data"] if shared > 1 else []


def _named(missing: Sequence[tuple[int, str]]) -> str:
    shown = ", ".join(f"{name} on rank {rank}" for rank, name in missing[:WORST_SHOWN])
    return shown + (f" and {len(missing) - WORST_SHOWN} more" if len(missing) > WORST_SHOWN else "")


def _worst_of_classes(wrong: Sequence[tuple[int, Mapping[str, Any], float]]) -> list[str]:
    """The worst shard of every class, and of offloaded ones as such."""
    by_class: dict[str, str] = {}
    for rank, entry, off in wrong:
        by_class.setdefault(entry["class"], f"{entry['class']} {entry['name']} on rank {rank} by {off:.1e}")
    return list(by_class.values())
