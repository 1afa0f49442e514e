"""How a model wants to be parallelised: the part of a plan that needs no framework.

Modules and parameters are named as in the model; ``*`` in a pattern stands for any text, as in the shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class ParallelPlan:
    """What :func:`hyper_parallel.parallelize` needs to know about a model and how it shall be sharded.

    Tensor parallelism stores every parameter in ``tensor_split`` cut along one dimension, and all others whole on each
    tensor-parallel rank. Between layers, each rank holds whole activations, or with ``sequence_parallel`` its share of the
    sequence. A *region* (attention, a feed-forward network, the head) sees the whole sequence and computes its cut of
    the layer; what leaves it is a sum over the tensor-parallel ranks (``regions``), or is itself cut along the last
    dimension (``head``).

    Args:
        layers: names of the repeated blocks, in forward order ("layers.0", "layers.1", ...).
        unit: what one sharded unit is: "layer", "model", or "auto" (see :func:`hyper_parallel.core.units.group_layers`).
        activation_checkpointing: keep only each layer's input and recompute the rest in backward.
        reshard_after_forward: free unsharded parameters between forward and backward; ``None`` is the engine's default.
        tensor_split: parameter pattern -> the dimension that tensor parallelism cuts.
        regions: modules whose first argument is gathered at their entrance and whose output is summed at their exit.
        embedding: the vocabulary-parallel embedding module, if any (its weight is in ``tensor_split`` with dimension 0).
        head: the module that gives logits, whose output stays cut along the vocabulary, if any.
        experts: modules that hold the experts of a layer stacked along dimension 0 of each parameter; expert parallelism
            cuts that dimension.
        expert_shard_dims: parameter pattern -> the dimension along which FSDP cuts a stacked expert parameter; dimension 0
            belongs to expert parallelism, and FSDP2 cuts no dimension but 0 unevenly.
        sequence_parallel: between regions, each tensor-parallel rank holds its share of the sequence.
        sequence_entrances: modules whose output is whole on every rank and is split along the sequence on leaving them, with
            ``sequence_parallel``. They see the whole sequence themselves.
        whole_sequence: modules that come before an entrance and so never see a split sequence either.
    """

    layers: tuple[str, ...]
    unit: str = "auto"
    activation_checkpointing: bool = False
    reshard_after_forward: bool | None = None
    tensor_split: Mapping[str, int] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    embedding: str | None = None
    head: str | None = None
    experts: tuple[str, ...] = ()
    expert_shard_dims: Mapping[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    sequence_entrances: tuple[str, ...] = ()
    whole_sequence: tuple[str, ...] = ()

    def tensor_dim(self, parameter: str) -> int | None:
        """The dimension that tensor parallelism cuts ``parameter`` along; None where every rank holds it whole."""
        return matching(self.tensor_split, parameter)

    def in_region(self, parameter: str) -> bool:
        """Whether ``parameter`` belongs to a module between the entrance and the exit of a region, or to the head."""
        modules = (*self.regions, self.head) if self.head else self.regions
        return any(fnmatchcase(parameter, f"{module}.*") for module in modules)

    def sees_whole_sequence(self, name: str) -> bool:
        """Whether the module or parameter ``name`` comes before the sequence is split, or it is never split."""
        modules = (*self.whole_sequence, *self.sequence_entrances)
        before = any(fnmatchcase(name, module) or fnmatchcase(name, f"{module}.*") for module in modules)
        return before or not self.sequence_parallel

    def is_expert(self, parameter: str) -> bool:
        """Whether ``parameter`` is a stack of experts."""
        return any(fnmatchcase(parameter, f"{module}.*") for module in self.experts)


def matching(patterns: Mapping[str, int], name: str) -> int | None:
    """The value of the first pattern that ``name`` matches."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)
