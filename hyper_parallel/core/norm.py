"""What a gradient norm is, for every p: identity, combination of parts, clip coefficient. Plain float64 arithmetic.

The gradients of a model are viewed as one flat vector x in which each element stands once:

    p > 0    (sum |x_i| ** p) ** (1 / p)
    inf      max |x_i|
    -inf     min |x_i|
    0        the number of non-zero x_i

A *part* is the norm of one piece of that vector, so that parts of parts combine by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

LARGEST_FLOAT32 = 2.0**128 - 2.0**103
"""From here on a float64 value becomes inf when it is rounded to float32."""

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as ``torch.nn.utils.clip_grad_norm_`` does."""


def parse_norm_type(norm_type: float | str) -> float:
    """``norm_type`` as a float; strings such as "inf" and "2" are accepted.

    Raises:
        ValueError: NaN, a negative finite number, or text that is no number.
    """
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = math.nan
    if math.isnan(p) or (p < 0 and not math.isinf(p)):
        raise ValueError(f"norm_type must be a number >= 0, inf or -inf, not {norm_type!r}")
    return p


def check_max_norm(max_norm: float) -> float:
    """``max_norm`` as a float.

    Raises:
        ValueError: negative (it would flip every gradient's sign) or NaN.
    """
    value = float(max_norm)
    if not value >= 0:
        raise ValueError(f"max_norm must be a number >= 0 (inf measures without clipping), not {max_norm!r}")
    return value


def identity(p: float) -> float:
    """The part of an empty piece: combining with it changes nothing."""
    return math.inf if p == -math.inf else 0.0


def combine(parts: Iterable[float], p: float) -> float:
    """The norm of the whole from the norms of its disjoint pieces; :func:`identity` when there are none.

    Scaled by the largest part, so that no intermediate overflows or underflows, and summed exactly (``math.fsum``), so
    that the result depends on neither order nor grouping. NaN in any part gives NaN.
    """
    values = list(parts)
    if any(math.isnan(value) for value in values):
        return math.nan
    if p == -math.inf:
        return min(values, default=math.inf)
    if p == 0:
        return math.fsum(values)
    largest = max(values, default=0.0)
    if p == math.inf or largest in (0.0, math.inf):
        return largest
    return scaled_root(largest, math.fsum((value / largest) ** p for value in values), p)


def scaled_root(scale: float, total: float, p: float) -> float:
    """``scale * total ** (1 / p)``; inf where that exceeds float64 (very small p over very many elements)."""
    try:
        return scale * (math.sqrt(total) if p == 2 else total ** (1 / p))
    except OverflowError:
        return math.inf


def clip_coefficient(norm: float, max_norm: float) -> float:
    """By what every gradient is multiplied: ``max_norm / (norm + 1e-6)``, at most 1."""
    if max_norm == math.inf:
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPSILON))
