"""What can be wrong with a gradient norm, as far as check-norm can tell it from what it measured."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """A cause and the measured evidence for it.

    Attributes:
        id: one of ``CAUSES``.
        evidence: what was measured, in words with numbers.
    """

    id: str
    evidence: str

    def __str__(self) -> str:
        return f"{CAUSES[self.id]} ({self.evidence})" if self.evidence else CAUSES[self.id]


CAUSES = {
    "collectives-broken": "the collectives themselves give wrong results",
    "same-data": "data-parallel ranks work on the same data",
    "dead-model": "the reference gradient is zero, so nothing can be checked",
    "gradient-missing": "parameters that train have no gradient",
    "zero-bubble-reshard": "a zero-bubble schedule runs over parameters that are freed after forward: its late weight gradients "
    "are computed with freed parameters",
    "last-micro-batch-only": "only the last micro-batch of each rank counts: the others' gradients are lost",
    "mean-of-means": "the loss is a mean of means over micro-batches and ranks, not the mean over the tokens of the global batch",
    "loss-scale-left-in": "a loss scale is left in the gradients",
    "summed-not-averaged": "gradients are too large by the number of data-parallel ranks: a sum where the mean was meant",
    "averaged-not-summed": "gradients are too small by the number of data-parallel ranks: they are averaged after the loss was "
    "already divided by the global batch",
    "expert-gradients-scaled": "only the experts' gradients are scaled: their factor belongs to another group of ranks",
    "false-replicate": "gradients that each tensor-parallel rank holds a part of are taken as whole: the sum over the ranks is missing",
    "reduce-dtype-too-wide": "gradients are reduced in float32 where the native dtype was asked for: None was read as the "
    "allocator's default",
    "reduce-dtype-too-narrow": "gradients are reduced in the compute dtype where float32 was asked for",
    "accumulated-too-narrow": "gradients are accumulated over micro-batches in the compute dtype where float32 was asked for",
    "tensor-reduction-rounded": "the sum over tensor-parallel ranks is made in the compute dtype, not in float32",
    "gradients-differ": "gradients differ from the reference in a way that fits no known cause",
    "local-norm-returned": "every rank returns the norm of what it holds itself: the reduction over ranks is missing",
    "stage-local-norm": "every pipeline stage returns the norm of its own stage: the reduction over the stages is missing",
    "ranks-disagree": "ranks hold different norms in a way that fits no known cause",
    "average-of-norms": "the norm is the average of the ranks' norms, not the root of the sum of their squares",
    "maximum-of-norms": "the norm is the largest of the ranks' norms, not the root of the sum of their squares",
    "sum-of-norms": "the norm is the sum of the ranks' norms, not the root of the sum of their squares",
    "rank-missing": "the contribution of a rank is missing from the norm",
    "replicated-counted-n-times": "replicated parameters are counted once on every rank that holds a replica",
    "tied-counted-twice": "a tied parameter is counted on every stage that holds a copy",
    "experts-partly-counted": "only part of the experts is counted in the norm",
    "norm-in-low-precision": "the norm is accumulated in a low precision",
    "norm-differs": "the norm differs from the reference in a way that fits no known cause",
    "not-clipped": "the norm is right and the gradients are left as they were: nothing is clipped",
    "clipped-twice": "the norm is right and the gradients are multiplied by the coefficient twice",
    "clipped-by-own-norm": "the norm is right and every rank clips by the norm of what it holds itself",
    "clipped-in-part": "the norm is right and only some of the gradients are clipped",
    "clipped-wrongly": "the norm is right and the gradients are not multiplied by what it asks for",
    "parts-misreported": "the norm is right and the parts of it that are told rank by rank are not",
    "norm-type-differs": "the 2-norm is right, and the norm of the type that the configuration asks for is not",
    "sums-wrong": "exact values do not come out of the reducer as their sum: gradients that go through it are wrong too",
    "losses-differ": "the loss differs from the reference",
    "offload-changes-bits": "a run with offload is not bit for bit the run without",
    "rank-failed": "a rank failed",
}
