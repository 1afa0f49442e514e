"""How layers are grouped into sharded units: each unit is gathered and reduced by one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hyper_parallel.core.plan import ParallelPlan

MINIMUM_UNIT_BYTES = 32 * 2**20
"""Below this an all-gather is bound by latency, not by bandwidth, on every backend in use."""


def group_layers(layer_bytes: Sequence[int], unit: str, rest_bytes: int = 0) -> list[list[int]]:
    """Group consecutive layers into units.

    Args:
        layer_bytes: unsharded size of each layer in bytes, in forward order.
        unit: "layer", one unit per layer; "model", no unit of its own (everything belongs to the root's); "auto",
            consecutive layers until a unit holds at least ``MINIMUM_UNIT_BYTES``, and none at all for a model that is
            smaller than that as a whole.
        rest_bytes: unsharded size of what is in no layer (embedding, head).

    Returns:
        Layer indices per unit. Layers in no unit belong to the root's.

    Raises:
        ValueError: an unknown ``unit``.
    """
    if unit == "layer":
        return [[index] for index in range(len(layer_bytes))]
    if unit == "model" or (unit == "auto" and sum(layer_bytes) + rest_bytes < MINIMUM_UNIT_BYTES):
        return []
    if unit != "auto":
        raise ValueError(f"unit must be auto, layer or model, not {unit!r}")
    units: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(layer_bytes):
        if filled >= MINIMUM_UNIT_BYTES:
            units.append([])
            filled = 0
        units[-1].append(index)
        filled += size
    return units


class ShardedUnit(NamedTuple):
    """Parameters that are gathered and reduced together.

    Attributes:
        names: of the parameters.
        layers: the layers, counted over those of the stage, between whose first forward and last they are in use; every one for
            the root's.
        experts: a unit of experts, which are sharded over ranks of their own.
        root: the unit of what is in no other.
    """

    names: tuple[str, ...]
    layers: range
    experts: bool
    root: bool


def sharded_units(
    plan: ParallelPlan, elements: Mapping[str, int], item_size: int, *, recomputed_apart: bool = False
) -> list[ShardedUnit]:
    """The units of a model, or one stage of it, in the order in which forward reaches them.

    Args:
        recomputed_apart: layers that are computed again in backward are never in the root's unit (MindSpore, where they make their
            own parameters whole).
        elements: parameter -> elements of the whole parameter, in the order of the model.
        item_size: bytes of an element while computing.
    """
    inside: dict[str, list[str]] = {layer: [] for layer in plan.layers}
    for name in elements:
        ends = (end for end, letter in enumerate(name) if letter == ".")
        layer = next((name[:end] for end in ends if name[:end] in inside), None)
        if layer is not None:
            inside[layer].append(name)
    layers = [layer for layer, names in inside.items() if names]
    experts = {name for name in elements if plan.experts and plan.is_expert(name)}
    stacks: dict[str, list[str]] = {}
    for name in elements:
        if name in experts:
            stacks.setdefault(name.rpartition(".")[0], []).append(name)

    def size(names: Sequence[str]) -> int:
        return item_size * sum(elements[name] for name in names)

    dense = {layer: [name for name in inside[layer] if name not in experts] for layer in layers}
    sizes = [size(dense[layer]) for layer in layers]
    rest = size([name for name in elements if name not in experts]) - sum(sizes)
    taken: set[str] = set()
    units = []
    groups = group_layers(sizes, plan.unit, rest)
    if recomputed_apart and plan.activation_checkpointing and not groups and layers:
        groups = [list(range(len(layers)))]
    for group in groups:
        names = tuple(name for index in group for name in dense[layers[index]])
        units.append(ShardedUnit(names, range(group[0], group[-1] + 1), False, False))
        taken.update(names)
    modules = list(stacks)
    grouped = group_layers([size(stacks[module]) for module in modules], plan.unit) or [list(range(len(modules)))] * bool(modules)
    for group in grouped:
        names = tuple(name for index in group for name in stacks[modules[index]])
        at = [index for index, layer in enumerate(layers) if not set(names).isdisjoint(inside[layer])]
        units.append(ShardedUnit(names, range(at[0], at[-1] + 1), True, False))
    root = tuple(name for name in elements if name not in taken and name not in experts)
    units.sort(key=lambda unit: (unit.layers.start, unit.experts))
    return [ShardedUnit(root, range(len(layers)), False, True), *units]
