"""What ranks tell each other about a gradient norm, and what every rank concludes from it.

Each rank gathers the same records and applies the same rules, so all ranks reach the same conclusion without another
message: the norm, whether the ranks hold the same list of parameters, and whether a second look is needed because
gradients are missing on some of them. A record is a fixed number of float64, whatever the model.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hyper_parallel.core.norm import LARGEST_FLOAT32, combine

_DIGEST_BYTES = 6  # 48 bits fit exactly into the 53-bit significand of a float64


def fingerprint(text: str | bytes) -> int:
    """A 48-bit digest that is the same in every process (Python's ``hash`` is not)."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), "big")


class RankRecord(NamedTuple):
    """One rank's account of its gradients, as float64 values.

    Attributes:
        contributed: norm of the elements that count on this rank.
        held: norm of all elements that this rank holds.
        with_gradient, without_gradient: parameters with and without a gradient (frozen ones are in neither).
        elements: gradient elements that count on this rank.
        parameters: fingerprint of the list: shapes, placements, order. 0 for an empty list.
        peers: fingerprint of the ranks that must hold the same list.
        present: fingerprint of which parameters have a gradient.
        replicas: fingerprint of the ranks that must hold the same gradients bit for bit; 0 where it differs by parameter.
        float64: 1 where a gradient is float64, else 0.
        partial: fingerprint of the gradients that are sums over ranks not yet made, and so count nothing here; 0 for none.
        error: 1 where this rank cannot measure its gradients, else 0.
    """

    contributed: float
    held: float
    with_gradient: float
    without_gradient: float
    elements: float
    parameters: float
    peers: float
    present: float
    replicas: float
    float64: float
    partial: float = 0.0
    error: float = 0.0


_SAME_FROM, _SAME_TO = RankRecord._fields.index("parameters"), RankRecord._fields.index("present") + 1


class Conclusion(NamedTuple):
    """What every rank concludes from all records, in the order of the ranks.

    Attributes:
        norm: the global norm in float64; 0 where no rank has a gradient element, inf where its dtype cannot hold it.
        float64: the norm is to be returned as float64, because some rank has a float64 gradient; else as float32.
        list_differs: positions of ranks whose list of parameters differs from their peers'.
        gradients_missing: a parameter has a gradient on one peer and none on another, or is not in its (empty) list.
        replicas_differ: groups of positions whose gradients should be equal bit for bit and are not.
        partial: some rank has gradients that are still to be summed over ranks.
        partial_differs: peers do not agree on which.
        errors: positions of ranks that cannot measure their gradients.
    """

    norm: float
    float64: bool
    list_differs: tuple[int, ...]
    gradients_missing: bool
    replicas_differ: tuple[tuple[int, ...], ...]
    partial: bool = False
    partial_differs: bool = False
    errors: tuple[int, ...] = ()


def conclude(records: Sequence[RankRecord], p: float) -> Conclusion:
    """Combine the ranks' records; every rank that holds the same records gets the same bits."""
    list_differs: list[int] = []
    gradients_missing = False
    if len({record[_SAME_FROM:_SAME_TO] for record in records}) > 1:  # nearly always, all say the same
        for positions in _positions_by(records, "peers"):
            lists = [records[i].parameters for i in positions if records[i].parameters]
            if len(set(lists)) > 1:
                usual = max(set(lists), key=lists.count)
                list_differs += [i for i in positions if records[i].parameters not in (0, usual)]
            gradients_missing |= len({records[i].present for i in positions}) > 1
    replicas_differ = tuple(
        positions
        for positions in _positions_by(records, "replicas")
        if records[positions[0]].replicas and len({_bits(records[i].held) for i in positions}) > 1
    )
    nothing = not any(record.elements for record in records)
    norm = 0.0 if nothing else combine((record.contributed for record in records), p)
    if math.isfinite(norm) and any(math.isnan(r.held) or (r.held == math.inf and p != -math.inf) for r in records):
        norm = math.nan  # a replica that does not count holds what no step may be taken with
    float64 = any(record.float64 for record in records)
    if not float64 and norm >= LARGEST_FLOAT32:
        norm = math.inf
    partial = any(record.partial for record in records)
    partial_differs = partial and any(
        len({records[i].partial for i in positions}) > 1 for positions in _positions_by(records, "peers")
    )
    errors = tuple(i for i, record in enumerate(records) if record.error)
    return Conclusion(
        norm, float64, tuple(sorted(list_differs)), gradients_missing, replicas_differ, partial, partial_differs, errors
    )


def with_more(conclusion: Conclusion, records: Sequence[RankRecord], norm: float, p: float) -> Conclusion:
    """The conclusion with elements of that norm added, which every rank knows in the same bits."""
    if math.isnan(conclusion.norm):
        return conclusion
    total = combine([conclusion.norm, norm], p) if any(record.elements for record in records) else norm
    if not conclusion.float64 and total >= LARGEST_FLOAT32:
        total = math.inf
    return conclusion._replace(norm=total)


def _positions_by(records: Sequence[RankRecord], field: str) -> list[tuple[int, ...]]:
    groups: dict[float, list[int]] = defaultdict(list)
    for position, record in enumerate(records):
        groups[getattr(record, field)].append(position)
    return [tuple(positions) for positions in groups.values()]


def _bits(value: float) -> bytes:
    return struct.pack("<d", math.nan if math.isnan(value) else value)
