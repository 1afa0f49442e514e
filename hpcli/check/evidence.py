"""What the ranks told, put together: the numbers that verdict and diagnosis follow from."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcli.check.powers import norm_of_pieces


class Expected(NamedTuple):
    """What a layout must come out as.

    Attributes:
        squares: sum of squares of the reference gradient of every parameter.
        loss: of the global batch.
        norm_tolerance: relative.
        relative, absolute: a shard g may differ from the reference's r by ``relative * ||r|| + absolute * ||all||``.
        witness: what the exact values must come out as.
        max_norm: that the gradients are clipped to.
        norm_type: the p that the configuration asks for, checked besides p = 2.
        clip_tolerance: by how much the size of a clipped shard may be off, relative; clipping rounds in the gradient's dtype.
    """

    squares: Mapping[str, float]
    loss: float
    norm_tolerance: float
    relative: float
    absolute: float
    witness: Mapping[str, float]
    max_norm: float = math.inf
    clip_tolerance: float = 1e-5
    norm_type: float = 2.0

    @property
    def norm(self) -> float:
        return math.sqrt(math.fsum(self.squares.values()))

    @property
    def loss_tolerance(self) -> float:
        """Relative."""
        return max(self.norm_tolerance, 1e-6)


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


class Clipped(NamedTuple):
    """A gradient shard that was multiplied by ``factor`` where ``right`` was due."""

    fact: Mapping[str, Any]
    name: str
    factor: float
    right: float


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

    def held(self, fact: Mapping[str, Any]) -> float:
        """The norm of all that a rank holds, replicas too, from its shards and not from what the library says of them."""
        return math.sqrt(math.fsum(entry.get("gg", 0.0) for entry in fact["parameters"]))

    def clipped_wrongly(self) -> list[Clipped]:
        """The gradient shards that clipping did not multiply by what the rank's own norm asks for. (Whether that is the right norm
        is another question.)"""
        found = []
        for fact, norm in zip(self.facts, self.norms, strict=True):
            if not math.isfinite(norm):
                continue
            right = coefficient(norm, self.expected.max_norm)
            for entry in fact["parameters"]:
                if entry.get("gg"):
                    factor = math.sqrt(fact["clipped"][entry["name"]] / entry["gg"])
                    if not close(factor, right, self.expected.clip_tolerance):
                        found.append(Clipped(fact, entry["name"], factor, right))
        return found

    def of_type(self) -> tuple[float, float] | None:
        """The norm of the type that was asked for, on the rank that is furthest off, and what it must be; None where it is 2."""
        if self.expected.norm_type == 2:
            return None
        right = norm_of_pieces(self.facts, self.expected.norm_type)
        found = [float(fact["norm_of_type"]) for fact in self.facts]
        return max(found, key=lambda norm: abs(norm - right)), right

    def offload_changes(self) -> list[str]:
        """What a run with offload has in other bits than one without."""
        return next((list(fact["offload"]) for fact in self.facts if fact.get("offload")), [])

    @property
    def offload_binds(self) -> bool:
        """Whether such a change is a failure, rather than something to tell."""
        return all(fact.get("offload_binds", True) for fact in self.facts)

    def misreported(self) -> list[str]:
        """Where the parts of the norm that the library tells rank by rank are not what the ranks hold, or do not make the norm."""
        found = []
        for fact in self.facts:
            if not close(fact["held"], self.held(fact), self.expected.norm_tolerance):
                found.append(f"rank {fact['rank']} is said to hold {fact['held']:.9g} and holds {self.held(fact):.9g}")
        made = math.sqrt(math.fsum(fact["contributed"] ** 2 for fact in self.facts))
        if not close(made, self.norms[0], self.expected.norm_tolerance):
            found.append(f"the ranks' contributions make {made:.9g}, the norm is {self.norms[0]:.9g}")
        return found

    def stage_norm(self, fact: Mapping[str, Any]) -> float:
        """The reference's norm of the parameters on this rank's pipeline stage."""
        names = {entry["name"] for entry in fact["parameters"]}
        return math.sqrt(math.fsum(square for name, square in self.expected.squares.items() if name in names))


def coefficient(norm: float, max_norm: float) -> float:
    """By what clipping multiplies every gradient, as torch.nn.utils.clip_grad_norm_ documents it."""
    return min(1.0, max_norm / (norm + 1e-6))


def close(a: float, b: float, relative: float = 1e-4) -> bool:
    """Whether two measured numbers are one and the same."""
    return math.isclose(a, b, rel_tol=relative)
