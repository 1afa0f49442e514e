"""How layers are grouped into sharded units: each unit is gathered and reduced by one collective."""

from __future__ import annotations

from collections.abc import Sequence

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
