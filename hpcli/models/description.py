"""A model's parameters as data: names, shapes and initial values, the same bits for every layout and platform.

Each initial value is drawn by NumPy from a generator keyed by the run's seed and the parameter's *name*, so it depends
neither on the order in which parameters are made nor on which rank or framework makes them.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from hpcli.config.schema import ModelSection

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


INITIAL_DEVIATION = 0.02


class ParameterSpec(NamedTuple):
    """Shape of a parameter, and its initial values: normal with this standard deviation, or all ones where it is None."""

    shape: tuple[int, ...]
    standard_deviation: float | None


def describe_model(model: ModelSection) -> dict[str, ParameterSpec]:
    """The parameters of a model in the order of its forward pass; tied ones once. Sizes must be resolved (not None)."""
    from hpcli.models.decoder import decoder_parameters
    from hpcli.models.vlm import vision_parameters

    return (vision_parameters(model) if model.kind == "vlm" else {}) | decoder_parameters(model)


def known(size: int | None) -> int:
    """A size that the configuration's resolution has filled in."""
    if size is None:
        raise ValueError("the model's sizes are not resolved yet; resolve_config fills them from the preset")
    return size


def initial_value(name: str, spec: ParameterSpec, seed: int) -> npt.NDArray[np.float32]:
    """The float32 initial value of the parameter ``name``."""
    import numpy as np

    if spec.standard_deviation is None:
        return np.ones(spec.shape, np.float32)
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(spec.shape, np.float32)
    values *= np.float32(spec.standard_deviation)
    return values


def frozen_names(names: list[str], patterns: list[str]) -> tuple[set[str], list[str]]:
    """The names that match any of the glob ``patterns``, and the patterns that match none."""
    matched = {pattern: {name for name in names if fnmatchcase(name, pattern)} for pattern in patterns}
    return set().union(*matched.values()), [pattern for pattern, found in matched.items() if not found]
