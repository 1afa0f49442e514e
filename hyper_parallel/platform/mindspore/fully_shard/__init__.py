"""Fully sharded data parallelism: read the life of a gradient in ``api``, ``state``, ``param_group``, ``param``."""

from hyper_parallel.platform.mindspore.fully_shard.api import (
    drain_reductions,
    fully_shard,
    set_requires_gradient_sync,
    states_of,
)
from hyper_parallel.platform.mindspore.fully_shard.state import FullyShardState

__all__ = ["FullyShardState", "drain_reductions", "fully_shard", "set_requires_gradient_sync", "states_of"]
