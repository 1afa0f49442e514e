"""From evidence to a cause. Each rule looks at measured parts, never at the total alone; the first that fits decides.

What is tested here is all that there is to tell causes apart: this module knows neither the planted faults nor the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from hpcli.check.causes import Cause
from hpcli.check.evidence import Clipped, Evidence, close, coefficient

SMALL_RESIDUAL = 1e-3
LEAST_LOSS_SCALE = 256.0
_WITNESS_SUMS = {"accumulated": {256.0, 258.0}, "reduced": {1.0, 1.0009765625}, "tensor": {1.0, 1.0009765625}}


def diagnose(evidence: Evidence) -> Cause:
    """The cause of a failure. Call it for layouts that failed only."""
    for rule in _RULES:
        cause = next(rule(evidence), None)
        if cause is not None:
            return cause
    return Cause("norm-differs", f"norm {evidence.norms[0]:.9g}, reference {evidence.expected.norm:.9g}")


def _oracle(evidence: Evidence) -> Iterator[Cause]:
    if not all(fact["collectives_add_up"] for fact in evidence.facts):
        yield Cause("collectives-broken", "powers of two over the ranks do not add up to 2^N - 1")
    if evidence.expected.norm == 0:
        yield Cause("dead-model", "reference norm 0")
    by_data: dict[str, set[tuple[int, int]]] = {}
    for fact in evidence.facts:
        position = fact["coordinates"]
        by_data.setdefault(fact["data"], set()).add((position["dp_replicate"], position["dp_shard"]))
    shared = max((len(places) for places in by_data.values()), default=0)
    if shared > 1:
        yield Cause("same-data", f"{shared} of {evidence.degrees.data_parallel} data-parallel ranks have the same tokens")


def _schedule(evidence: Evidence) -> Iterator[Cause]:
    resharded = any(fact["reshards"] for fact in evidence.facts)
    if evidence.degrees.zero_bubble and resharded and (evidence.missing() or evidence.wrong()):
        wrong, missing = len(evidence.wrong()), len(evidence.missing())
        yield Cause("zero-bubble-reshard", f"{missing} shards without gradient, {wrong} with a wrong one")
    if missing_ones := evidence.missing():
        rank, name = missing_ones[0]
        yield Cause("gradient-missing", f"{len(missing_ones)} shards, first {name} on rank {rank}")


def _witness(evidence: Evidence) -> Iterator[Cause]:
    """A witness that every rank has as the other dtype's sum. (Anything else is a wrong sum, not a rounded one.)"""
    found = {
        name: {fact["witness"][name] for fact in evidence.facts if "witness" in fact}
        for name in ("tensor", "accumulated", "reduced")  # a rounded sum over tensor-parallel ranks shows in the others too
        if name in evidence.expected.witness
    }
    narrow = evidence.degrees.reduce_dtype == "float32"
    for name, values in found.items():
        right = evidence.expected.witness[name]
        if len(values) > 1 or values == {right} or not values <= _WITNESS_SUMS[name]:
            continue
        words = f"a sum that must be {right} came out as {values.pop()}"
        if name == "tensor":
            yield Cause("tensor-reduction-rounded", words)
        elif not narrow:
            yield Cause("reduce-dtype-too-wide", words)
        else:
            yield Cause("accumulated-too-narrow" if name == "accumulated" else "reduce-dtype-too-narrow", words)


def _gradients(evidence: Evidence) -> Iterator[Cause]:
    if not evidence.wrong():
        return
    whole = evidence.sums()
    for distance, cause in ((whole.to_last, "last-micro-batch-only"), (whole.to_means, "mean-of-means")):
        off = math.sqrt(distance / whole.gg) if whole.gg else math.inf
        if off < SMALL_RESIDUAL:
            yield Cause(cause, f"the gradients are that to {off:.1e}")
    by_class = {kind: evidence.sums(kind) for kind in evidence.classes}
    ratios = {kind: sums.ratio for kind, sums in by_class.items()}
    steady = all(sums.residual < SMALL_RESIDUAL for sums in by_class.values() if sums.rr)
    words = ", ".join(f"{kind} x{ratio:.6g}" for kind, ratio in ratios.items())
    if steady:
        yield from _factor(evidence, ratios, words)
    if _parts_add_up(evidence, ratios):
        yield Cause("false-replicate", f"the replicas' parts add up to the reference; {words}")
    rank, entry, off = evidence.wrong()[0]
    yield Cause("gradients-differ", f"worst {entry['name']} on rank {rank}, off by {off:.1e}; {words}")


def _factor(evidence: Evidence, ratios: dict[str, float], words: str) -> Iterator[Cause]:
    """The gradient is the reference times one factor, or times one for each class."""
    factor = ratios[next(iter(ratios))]
    ranks = evidence.degrees.data_parallel
    if all(close(ratio, factor) for ratio in ratios.values()):
        power = math.log2(factor) if factor > 0 else math.nan
        if factor >= LEAST_LOSS_SCALE and close(power, round(power), 1e-6):
            yield Cause("loss-scale-left-in", f"every gradient is {factor:.6g} = 2^{round(power)} times the reference")
        if ranks > 1 and close(factor, ranks):
            yield Cause("summed-not-averaged", f"every gradient is {factor:.6g} times the reference, on {ranks} ranks")
        if ranks > 1 and close(factor, 1 / ranks):
            yield Cause("averaged-not-summed", f"every gradient is 1/{1 / factor:.6g} of the reference, on {ranks} ranks")
    others = [ratio for kind, ratio in ratios.items() if kind != "expert"]
    if "expert" in ratios and not close(ratios["expert"], 1) and all(close(ratio, 1) for ratio in others):
        yield Cause("expert-gradients-scaled", words)


def _parts_add_up(evidence: Evidence, ratios: dict[str, float]) -> bool:
    """Whether what the tensor-parallel ranks hold of replicated parameters adds up to the reference, on all of them together."""
    tp = evidence.degrees.tp
    parts = "replicated" in ratios and tp > 1 and close(ratios["replicated"] * tp, 1, 1e-3)
    return parts and all(close(ratio, 1, 1e-3) for kind, ratio in ratios.items() if kind != "replicated")


def _disagreement(evidence: Evidence) -> Iterator[Cause]:
    if len(evidence.norm_bits) == 1:
        return
    digits = next(n for n in (6, 9, 17) if n == 17 or len({f"{norm:.{n}g}" for norm in evidence.norms}) > 1)
    listed = ", ".join(f"{norm:.{digits}g}" for norm in evidence.norms[:4]) + (", ..." if len(evidence.norms) > 4 else "")
    if evidence.degrees.pp > 1 and all(
        close(norm, evidence.stage_norm(fact)) for norm, fact in zip(evidence.norms, evidence.facts, strict=True)
    ):
        yield Cause("stage-local-norm", f"rank by rank {listed}; all stages together {evidence.expected.norm:.6g}")
    if all(close(norm, evidence.held(fact)) for norm, fact in zip(evidence.norms, evidence.facts, strict=True)):
        yield Cause("local-norm-returned", f"rank by rank {listed}; all ranks together {evidence.expected.norm:.6g}")
    yield Cause("ranks-disagree", f"rank by rank {listed}; reference {evidence.expected.norm:.{digits}g}")


def _combination(evidence: Evidence) -> Iterator[Cause]:
    norm, right = evidence.norms[0], evidence.expected.norm
    if close(norm, right, evidence.expected.norm_tolerance):
        return
    held = [evidence.held(fact) for fact in evidence.facts]
    for value, cause in (
        (math.fsum(held) / len(held), "average-of-norms"),
        (max(held), "maximum-of-norms"),
        (math.fsum(held), "sum-of-norms"),
    ):
        if len(held) > 1 and close(norm, value, 1e-6):
            yield Cause(cause, f"norm {norm:.9g}, reference {right:.9g}")
    weights = {kind: evidence.weight(kind) for kind in evidence.classes}
    words = "counted " + ", ".join(f"{kind} {weight:.6g} times" for kind, weight in weights.items())
    replicas = evidence.degrees.dp_replicate
    if replicas > 1 and all(close(weight, replicas) for weight in weights.values()):
        yield Cause("replicated-counted-n-times", f"{words}, on {replicas} replicas")
    tp = evidence.degrees.tp
    if tp > 1 and close(weights.get("replicated", 1), tp) and _once(weights, but="replicated"):
        yield Cause("replicated-counted-n-times", f"{words}, on {tp} tensor-parallel ranks")
    if close(weights.get("tied", 1), 2) and _once(weights, but="tied"):
        yield Cause("tied-counted-twice", words)
    if weights.get("expert", 1) < 1 - 1e-3 and _once(weights, but="expert"):
        yield Cause("experts-partly-counted", words)
    for fact, norm_held in zip(evidence.facts, held, strict=True):
        without = math.sqrt(max(right**2 - norm_held**2, 0.0))
        if norm_held > 1e-3 * right and close(norm, without, 1e-6):
            yield Cause("rank-missing", f"norm {norm:.9g} is the reference {right:.9g} without rank {fact['rank']}")
    if close(norm, right, 2.0**-6) and all(close(weight, 1, 2.0**-5) for weight in weights.values()):
        yield Cause("norm-in-low-precision", f"norm {norm:.9g}, reference {right:.9g}; {words}")
    yield Cause("norm-differs", f"norm {norm:.9g}, reference {right:.9g}; {words}")


def _once(weights: dict[str, float], *, but: str) -> bool:
    return all(close(weight, 1) for kind, weight in weights.items() if kind != but)


def _clipping(evidence: Evidence) -> Iterator[Cause]:
    wrong = evidence.clipped_wrongly()
    if not wrong:
        return
    tolerance = evidence.expected.clip_tolerance
    first = wrong[0]
    words = f"{first.name} on rank {first.fact['rank']} is multiplied by {first.factor:.6g}, not {first.right:.6g}"
    shards = sum(1 for _, entry in evidence.entries if entry.get("gg"))
    if len(wrong) < shards:
        kinds = ", ".join(sorted({evidence.class_of[clipped.name] for clipped in wrong}))
        yield Cause("clipped-in-part", f"{len(wrong)} of {shards} shards ({kinds}): {words}")
    own = {fact["rank"]: coefficient(evidence.held(fact), evidence.expected.max_norm) for fact in evidence.facts}
    due: dict[str, Callable[[Clipped], float]] = {
        "not-clipped": lambda clipped: 1.0,
        "clipped-twice": lambda clipped: clipped.right**2,
        "clipped-by-own-norm": lambda clipped: own[clipped.fact["rank"]],
    }
    for cause, factor in due.items():
        if all(close(clipped.factor, factor(clipped), tolerance) for clipped in wrong):
            yield Cause(cause, words)
    yield Cause("clipped-wrongly", words)


def _rest(evidence: Evidence) -> Iterator[Cause]:
    if not close(evidence.loss, evidence.expected.loss, evidence.expected.loss_tolerance):
        yield Cause("losses-differ", f"loss {evidence.loss:.9g}, reference {evidence.expected.loss:.9g}")
    for name, right in evidence.expected.witness.items():
        for fact in evidence.facts:
            if fact["witness"][name] != right:
                yield Cause("sums-wrong", f"{right} ({name}) came out as {fact['witness'][name]} on rank {fact['rank']}")
    other = evidence.of_type()
    if other is not None and not close(*other, 1e-6):
        yield Cause("norm-type-differs", f"{other[0]:.9g} instead of {other[1]:.9g}")
    changes = evidence.offload_changes()
    if changes and evidence.offload_binds:
        yield Cause("offload-changes-bits", ", ".join(changes))
    if misreported := evidence.misreported():
        yield Cause("parts-misreported", misreported[0])


Rule = Callable[[Evidence], Iterator[Cause]]
_RULES: tuple[Rule, ...] = (_oracle, _schedule, _witness, _gradients, _disagreement, _combination, _clipping, _rest)
