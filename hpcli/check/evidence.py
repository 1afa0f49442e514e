"""What the ranks told, put together: the numbers that verdict and diagnosis follow from."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Expected(NamedTuple):
    """What a layout must come out as.

    Attributes:
        squares: sum of squares of the reference gradient of every parameter.
        loss: of the global batch.
        norm_tolerance: relative.
        relative, absolute: a shard g may differ from the reference's r by ``relative * ||r|| + absolute * ||all||``.
        witness: what the exact values must come out as.
    """

    squares: Mapping[str, float]
    loss: float
    norm_tolerance: float
    relative: float
    absolute: float
    witness: Mapping[str, float]

    @property
    def norm(self) -> float:
        return math.sqrt(math.fsum(self.squares.values()))


class Degrees(NamedTuple):
    """The degrees of parallelism that a cause may follow from."""

    pp: int
    dp_replicate: int
    dp_shard: int
    ep: int
    tp: int
    zero_bubble: bool
    reduce_dtype: str

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard


def expected_witness(degrees: Degrees) -> dict[str, float]:
    """What the witnesses (:mod:`hpcli.check.witness`) must come out as; those that these degrees cannot show are left out."""
    exact = degrees.reduce_dtype == "float32"
    values = {"accumulated": 258.0 if exact else 256.0}
    if degrees.data_parallel > 1:
        values["reduced"] = 1.0009765625 if exact else 1.0
    if degrees.tp > 1:
        values["tensor"] = 1.0009765625
    return values


class Sums(NamedTuple):
    """Sums over the shards of some parameters on all ranks: <g,g>, <g,r>, <r,r>, and squared distances to other gradients."""

    gg: float
    gr: float
    rr: float
    to_right: float
    to_last: float
    to_means: float

    @property
    def ratio(self) -> float:
        """The factor by which the gradient is the reference, in the least-squares sense."""
        return self.gr / self.rr if self.rr else math.nan

    @property
    def residual(self) -> float:
        """What no factor explains, relative to the gradient."""
        return math.sqrt(max(self.gg - self.gr**2 / self.rr, 0.0) / self.gg) if self.rr and self.gg else math.nan


class Evidence:
    """The ranks' accounts of one layout, in rank order, and what was expected."""

    def __init__(self, facts: Sequence[Mapping[str, Any]], expected: Expected, degrees: Degrees) -> None:
        self.facts = sorted(facts, key=lambda fact: fact["rank"])
        self.expected = expected
        self.degrees = degrees
        self.norms = [struct.unpack("<d", bytes.fromhex(fact["norm"]))[0] for fact in self.facts]
        self.norm_bits = {fact["norm"] for fact in self.facts}
        self.loss = math.fsum(fact["loss"] for fact in self.facts)
        self.entries = [(fact["rank"], entry) for fact in self.facts for entry in fact["parameters"]]
        self.class_of = {entry["name"]: entry["class"] for _, entry in self.entries}
        self.classes = sorted(set(self.class_of.values()))

    def sums(self, kind: str | None = None) -> Sums:
        """The sums over all parameters, or those of one class."""
        chosen = [entry for _, entry in self.entries if "gg" in entry and kind in (None, entry["class"])]
        keys = ("gg", "gr", "rr", "to_right", "to_last_micro_batch", "to_mean_of_means")
        return Sums(*(math.fsum(entry[key] for entry in chosen) for key in keys))

    def wrong(self) -> list[tuple[int, Mapping[str, Any], float]]:
        """Rank, entry and relative difference of every shard that differs by more than it may, the worst first."""
        found = []
        for rank, entry in self.entries:
            difference = self.difference(entry)
            if difference is not None and difference[1]:
                found.append((rank, entry, difference[0]))
        return sorted(found, key=lambda item: -item[2])

    def difference(self, entry: Mapping[str, Any]) -> tuple[float, bool] | None:
        """||g-r|| / ||r|| of a shard (relative to all where r is zero) and whether that is too much; None without a gradient."""
        if entry["missing"]:
            return None
        if "gg" not in entry:
            return math.inf, True
        distance, size, whole = math.sqrt(entry["to_right"]), math.sqrt(entry["rr"]), self.expected.norm
        allowed = self.expected.relative * size + self.expected.absolute * whole
        relative = distance / (size + self.expected.absolute * whole) if size or whole else math.inf
        return (relative, not distance <= allowed)

    def worst(self) -> tuple[str, float]:
        """The parameter whose shard differs most, and by how much."""
        pairs = [(entry["name"], d[0]) for _, entry in self.entries if (d := self.difference(entry)) is not None]
        return max(pairs, key=lambda pair: pair[1], default=("", math.nan))

    def missing(self) -> list[tuple[int, str]]:
        """Rank and name of trainable parameters without a gradient."""
        return [(rank, entry["name"]) for rank, entry in self.entries if entry["missing"]]

    def weight(self, kind: str) -> float:
        """How often the elements of a class were counted: the ratio of squares of its norm as measured alone and as it is."""
        known = {name for name, its in self.class_of.items() if its == kind}
        right = math.fsum(square for name, square in self.expected.squares.items() if name in known)
        measured = [fact["classes"][kind] for fact in self.facts if kind in fact["classes"]]
        return measured[0] ** 2 / right if right and measured else math.nan

    def stage_norm(self, fact: Mapping[str, Any]) -> float:
        """The reference's norm of the parameters on this rank's pipeline stage."""
        names = {entry["name"] for entry in fact["parameters"]}
        return math.sqrt(math.fsum(square for name, square in self.expected.squares.items() if name in names))


def close(a: float, b: float, relative: float = 1e-4) -> bool:
    """Whether two measured numbers are one and the same."""
    return math.isclose(a, b, rel_tol=relative)
