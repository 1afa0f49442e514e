"""How a model wants to be parallelised: the part of a plan that needs no framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelPlan:
    """What :func:`hyper_parallel.parallelize` needs to know about a model and how it shall be sharded.

    Args:
        layers: names of the repeated blocks, in forward order ("layers.0", "layers.1", ...).
        unit: what one sharded unit is: "layer", "model", or "auto" (see :func:`hyper_parallel.core.units.group_layers`).
        activation_checkpointing: keep only each layer's input and recompute the rest in backward.
        reshard_after_forward: free unsharded parameters between forward and backward; ``None`` is the engine's default.
    """

    layers: tuple[str, ...]
    unit: str = "auto"
    activation_checkpointing: bool = False
    reshard_after_forward: bool | None = None
