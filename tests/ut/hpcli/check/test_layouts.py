"""The matrix of layouts: something sensible for every number of ranks."""

from __future__ import annotations

import pytest

from hpcli.check.layouts import matrix
from hpcli.faults.registry import faults


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_every_number_of_ranks_has_layouts_that_use_all_of_them(ranks):
    layouts = matrix(ranks)
    assert len({layout.name for layout in layouts}) == len(layouts) >= 9
    assert all(layout.resolved.world_size == ranks for layout in layouts)
    meshes = [layout.resolved.mesh for layout in layouts]
    if ranks > 1:
        assert any(mesh.tp > 1 for mesh in meshes)
        assert any(mesh.pp > 1 for mesh in meshes)
        assert any(mesh.ep > 1 for mesh in meshes)


def test_eight_ranks_have_the_layouts_that_were_promised():
    names = {layout.name for layout in matrix(8)}
    assert names == {
        "fsdp8",
        "hsdp2x4",
        "fsdp8-offload",
        "fsdp8-bf16-fp32-reduce",
        "fsdp8-bf16-native-reduce",
        "fsdp8-fp16",
        "fsdp8-accumulation",
        "fsdp8-frozen",
        "fsdp8-tied",
        "tp2-fsdp4",
        "tp2+sp-fsdp4",
        "tp8",
        "pp2-fsdp4",
        "pp2-fsdp4-tied",
        "pp4-interleaved-fsdp2",
        "pp2-zero-bubble-fsdp4",
        "tp2+sp-pp2-fsdp2-mla",
        "ep4-fsdp8",
        "ep2-tp2-8-ranks",
        "moe-hsdp2x4-ep2",
        "vlm-fsdp8",
    }


def test_every_fault_is_carried_by_a_layout_of_four_ranks():
    names = {layout.name for layout in matrix(4)}
    carriers = {name: fault.layout.format(ranks=4, half=2) for name, fault in faults().items()}
    assert {name: layout for name, layout in carriers.items() if layout not in names} == {}
