"""Grouping layers into sharded units: a unit is gathered and reduced by one collective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.units import MINIMUM_UNIT_BYTES, group_layers, sharded_units

MIB = 2**20


def test_layer_gives_each_layer_a_unit_and_model_gives_none():
    assert group_layers([MIB] * 3, "layer") == [[0], [1], [2]]
    assert group_layers([1000 * MIB] * 3, "model") == []


def test_a_small_model_is_one_unit():
    assert group_layers([MIB] * 4, "auto") == []
    assert group_layers([MIB] * 4, "auto", rest_bytes=28 * MIB) == [[0, 1, 2, 3]]


def test_auto_fills_each_unit_to_the_minimum_before_the_next_begins():
    assert MINIMUM_UNIT_BYTES == 32 * MIB
    assert group_layers([16 * MIB] * 6, "auto") == [[0, 1], [2, 3], [4, 5]]
    assert group_layers([40 * MIB] * 3, "auto") == [[0], [1], [2]]
    assert group_layers([20 * MIB] * 5, "auto") == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("unit", ["layer", "auto"])
def test_every_layer_is_in_one_unit_in_order(unit):
    sizes = [(index * 7 % 5 + 1) * 8 * MIB for index in range(50)]
    units = group_layers(sizes, unit)
    assert [layer for members in units for layer in members] == list(range(50))


def test_no_layers_make_no_units():
    assert group_layers([], "layer") == []
    assert group_layers([], "auto") == []


def test_an_unknown_unit_is_refused():
    with pytest.raises(ValueError, match="auto, layer or model, not 'block'"):
        group_layers([MIB], "block")


PLAN = ParallelPlan(layers=("layers.0", "layers.1"), unit="layer", experts=("layers.*.experts",))
ELEMENTS = {"embedding.weight": 8, "layers.0.a": 3, "layers.1.a": 3, "layers.1.experts.up": 16, "norm.weight": 2}


def test_units_of_a_model_come_in_the_order_of_forward_with_the_rest_in_the_root():
    root, first, second, experts = sharded_units(PLAN, ELEMENTS, 4)
    assert root.names == ("embedding.weight", "norm.weight") and root.root and root.layers == range(2)
    assert first.names == ("layers.0.a",) and first.layers == range(1)
    assert second.names == ("layers.1.a",) and not second.experts
    assert experts.names == ("layers.1.experts.up",) and experts.experts and experts.layers == range(1, 2)


def test_experts_of_a_small_model_are_one_unit_and_all_else_the_root():
    units = sharded_units(replace(PLAN, unit="auto"), ELEMENTS, 4)
    assert [(unit.root, unit.experts) for unit in units] == [(True, False), (False, True)]


def test_recomputed_layers_are_kept_out_of_the_root_where_asked():
    plan = replace(PLAN, unit="model", activation_checkpointing=True)
    assert [unit.root for unit in sharded_units(plan, ELEMENTS, 4)] == [True, False]
    assert [unit.layers for unit in sharded_units(plan, ELEMENTS, 4, recomputed_apart=True)] == [range(2), range(2), range(1, 2)]
