"""Do all ranks hold the same norm? Answered on bits, because two norms that print alike can still differ."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any

from hpcli.report.formats import count_text, digits_that_tell_apart, norm_text, ranks_text

MOST_VALUES = 8


def bits(value: float | None) -> bytes | None:
    """The eight bytes of a double; ``None`` for a rank that reported nothing. NaNs with equal bits are equal."""
    return None if value is None else struct.pack("<d", value)


def ranks_by_norm(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float | None, list[int]]]:
    """The distinct global norms, each with the ranks that hold it: the most widely held first, then by rank."""
    held: dict[bytes | None, tuple[float | None, list[int]]] = {}
    for row in rows:
        norm = row.get("global_norm")
        norm = None if norm is None else float(norm)
        held.setdefault(bits(norm), (norm, []))[1].append(row["rank"])
    return sorted(held.values(), key=lambda group: (-len(group[1]), min(group[1])))


def norm_verdict(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """Whether all rows hold the same ``global_norm``, bit for bit, and a sentence that says so.

    A norm that is the same NaN or infinity everywhere counts as agreement, and the sentence says that it is not
    finite. A row without a norm agrees with nobody.
    """
    groups = ranks_by_norm(rows)
    if not groups:
        return False, "DISAGREE: no rank reported a norm"
    first, _ = groups[0]
    if len(groups) == 1 and first is not None:
        holders = f"{len(rows):,} of {count_text(len(rows), 'rank')} {'holds' if len(rows) == 1 else 'hold'}"
        finite = "" if isfinite(first) else " (NOT FINITE)"
        return True, f"{holders} {norm_text(first)}, bit for bit{finite}"
    digits = digits_that_tell_apart(norm for norm, _ in groups)
    parts = [
        f"{ranks_text(ranks)} {'holds' if len(ranks) == 1 else 'hold'} {_exactly(norm, digits)}"
        for norm, ranks in groups[:MOST_VALUES]
    ]
    if left := groups[MOST_VALUES:]:
        others = sum(len(ranks) for _, ranks in left)
        parts.append(f"{count_text(others, 'more rank')} hold {count_text(len(left), 'other value')}")
    return False, "DISAGREE: " + "; ".join(parts)


def _exactly(norm: float | None, digits: int) -> str:
    if norm is None:
        return "no norm"
    exact = f"bits 0x{struct.pack('>d', norm).hex()}" if isnan(norm) else norm.hex()
    return f"{norm_text(norm, digits)} ({exact})"
