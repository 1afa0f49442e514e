"""Norms other than 2, of the gradients as they are. Independent of the library's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def power_norm(elements: Any, p: float) -> float:
    """The p-norm of float64 ``elements`` as one flat vector: the largest magnitude for inf, the smallest for -inf, the number of
    non-zero ones for 0. Without elements 0, and inf for -inf."""
    magnitudes = np.abs(np.asarray(elements, np.float64)).ravel()
    if p == 0:
        return float(np.count_nonzero(magnitudes))
    if p == -math.inf:
        return float(magnitudes.min(initial=math.inf))
    largest = float(magnitudes.max(initial=0.0))
    if math.isinf(p) or largest in (0.0, math.inf):
        return largest
    return largest * float(np.power(magnitudes / largest, p).sum()) ** (1 / p)  # scaled, so that no power overflows


def norm_of_pieces(facts: Sequence[Mapping[str, Any]], p: float) -> float:
    """The p-norm of what all ranks hold, a piece that several of them hold counted once."""
    pieces = {tuple(entry["piece"]): entry["power_norm"] for fact in facts for entry in fact["parameters"] if "power_norm" in entry}
    norms = list(pieces.values())
    return math.fsum(norms) if p == 0 else power_norm(norms, p)
