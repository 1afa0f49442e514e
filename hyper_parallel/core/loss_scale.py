"""Dynamic loss scaling for float16, whose smallest gradients would otherwise be lost.

The loss is multiplied by a power of two before backward. Nothing unscales the gradients by a pass of its own: one over
the scale is folded into the norm and into the clip coefficient. A step is skipped exactly when the global norm is not finite,
and since that is the same bits on every rank, so are the skip and the next scale; no rank has to ask another.

The rule is that of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, with the constants of common practice:
halve on overflow, double after ``growth_interval`` steps without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGEST_SCALE = 2.0**24
SMALLEST_SCALE = 1.0


@dataclass
class LossScaler:
    """The scale of the next step.

    Args:
        scale: what the loss is multiplied by.
        growth_interval: steps in a row without overflow after which the scale doubles.
        steps_since_change: how many of them there have been.
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    steps_since_change: int = 0

    def unscaled(self, norm: float) -> float:
        """The norm of the unscaled gradients, of the norm of the scaled ones. Exact where the scale is a power of two."""
        return norm / self.scale

    def update(self, norm: float) -> bool:
        """Take note of a step's global norm; whether the step may be taken, False where the norm is not finite."""
        if not math.isfinite(norm):
            self.scale = max(self.scale / 2, SMALLEST_SCALE)
            self.steps_since_change = 0
            return False
        self.steps_since_change += 1
        if self.steps_since_change >= self.growth_interval:
            self.scale = min(self.scale * 2, LARGEST_SCALE)
            self.steps_since_change = 0
        return True
