"""The dtypes of a run, from its configuration."""

from __future__ import annotations

from hpcli.config.schema import Config
from hyper_parallel.core.precision import MixedPrecisionPolicy


def precision_policy(config: Config) -> MixedPrecisionPolicy:
    """The dtypes that a configuration asks for."""
    training = config.training
    return MixedPrecisionPolicy(
        params_dtype=training.params_dtype,
        compute_dtype=training.compute_dtype,
        reduce_dtype="float32" if training.accumulate_allreduce_grads_in_fp32 else None,
    )
