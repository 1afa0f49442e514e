"""Sums of squares and magnitudes on devices without float64 (Ascend): each number is a pair of float32, high and low part.

Products and sums are error-free transformations, which give the rounded result and its rounding error (Dekker, "A floating-point
technique for extending the available precision", 1971; Knuth, TAOCP 2, 4.2.2), so a sum of any length is good to about 2^-44.
Elements are scaled by a power of two first: nothing overflows, and what underflows does not matter. No operation here waits
for the host; :func:`norm` reads one pair and one scale.
"""

from __future__ import annotations

import math

import torch

_SPLIT = 4097.0  # 2^12 + 1: cuts 24 bits into halves of 12
_EXPONENT = 0x7F800000  # the bits of a float32's exponent
WITHOUT_FLOAT64 = {"npu", "mps"}
"""Device types; a test adds the CPU."""


def supports_float64(device: torch.device) -> bool:
    """Whether ``device`` computes in float64: the one place that decides it."""
    return device.type not in WITHOUT_FLOAT64


def norm(flat: torch.Tensor, p: float) -> float:
    """The 1-norm or 2-norm of a flat float32 tensor; NaN and infinite where an element is."""
    if flat.numel() == 0:
        return 0.0
    magnitudes = flat.abs()
    largest = magnitudes.max()
    # the power of two at or below the largest: dividing by it is exact. 1 where that is zero, subnormal or not finite
    scale = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
    scale = torch.where((scale == 0) | ~torch.isfinite(largest), torch.ones_like(scale), scale)
    scaled = magnitudes / scale
    high, low = total(*square(scaled)) if p == 2 else total(scaled, torch.zeros_like(scaled))
    above, below, unit, most = torch.stack([high, low, scale, largest]).tolist()
    if not math.isfinite(most):
        return most
    return unit * (math.sqrt(above + below) if p == 2 else above + below)


def square(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * x`` without error, as high and low parts."""
    high = x * x
    cut = _SPLIT * x
    head = cut - (cut - x)
    tail = x - head
    return high, ((head * head - high) + 2 * (head * tail)) + tail * tail


def total(high: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a flat tensor of pairs, added up in halves, as one pair of 0-dim tensors."""
    while high.numel() > 1:
        half = (high.numel() + 1) // 2
        odd = 2 * half - high.numel()
        a, b = high[:half], torch.nn.functional.pad(high[half:], (0, odd))
        rest = low[:half] + torch.nn.functional.pad(low[half:], (0, odd))
        high = a + b
        other = high - a
        rest = rest + ((a - (high - other)) + (b - other))
        low_of_sum = high + rest  # high again takes what has gathered below it
        low = rest - (low_of_sum - high)
        high = low_of_sum
    return high.reshape(()), low.reshape(())
