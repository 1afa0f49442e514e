"""The layout of fused buffers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.flat_buffer import (
    FlatLayout,
    Slot,
    aligned_layout,
    check_buffer,
    packed_layout,
    split_by,
)


def test_without_a_reduce_dtype_the_layout_counts_in_the_gradients_own_dtype():
    """issue-217: six and five elements, aligned to 16 bytes: 8 bfloat16 or 4 float32."""
    native = aligned_layout([6, 5], None, "bfloat16", 16)
    assert native == FlatLayout("bfloat16", (Slot(0, 6), Slot(8, 5)), 16)
    assert (native.item_size, native.nbytes) == (2, 32)
    wide = aligned_layout([6, 5], "float32", "bfloat16", 16)
    assert wide == FlatLayout("float32", (Slot(0, 6), Slot(8, 5)), 16)
    assert (wide.item_size, wide.nbytes) == (4, 64)
    assert aligned_layout([6, 5], None, "float32", 16) == wide


def test_alignment_is_in_bytes_and_so_depends_on_the_dtype():
    assert [slot.offset for slot in aligned_layout([1, 1, 1], None, "bfloat16").slots] == [0, 256, 512]
    assert [slot.offset for slot in aligned_layout([1, 1, 1], None, "float32").slots] == [0, 128, 256]


def test_empty_shards_take_no_room():
    layout = aligned_layout([0, 3, 0, 2], None, "float32", 16)
    assert layout.slots == (Slot(0, 0), Slot(0, 3), Slot(4, 0), Slot(4, 2))
    assert layout.total == 8
    assert aligned_layout([], None, "float32").total == 0


def test_padding_is_what_no_slot_covers():
    assert aligned_layout([6, 5], None, "bfloat16", 16).padding == (Slot(6, 2), Slot(13, 3))
    assert packed_layout([6, 5], "bfloat16").padding == ()
    assert packed_layout([6, 5], "bfloat16").slots == (Slot(0, 6), Slot(6, 5))


@given(st.lists(st.integers(0, 40), max_size=8), st.sampled_from(["float32", "bfloat16", "float64"]), st.integers(0, 6))
def test_slots_are_aligned_and_cover_the_buffer_with_the_padding_once(lengths, dtype, power):
    layout = aligned_layout(lengths, None, dtype, 8 * 2**power)
    covered = [0] * layout.total
    for slot in (*layout.slots, *layout.padding):
        for index in range(slot.offset, slot.end):
            covered[index] += 1
    assert covered == [1] * layout.total
    assert [slot.length for slot in layout.slots] == lengths
    assert all(slot.offset * layout.item_size % (8 * 2**power) == 0 for slot in layout.slots)


@pytest.mark.parametrize("lengths, alignment, words", [([-1], 16, "-1 elements"), ([1], 6, "6 bytes"), ([1], 0, "0 bytes")])
def test_what_cannot_be_laid_out_is_refused(lengths, alignment, words):
    with pytest.raises(ValueError, match=words):
        aligned_layout(lengths, None, "float32", alignment)


def test_a_buffer_of_another_dtype_or_size_is_refused():
    layout = aligned_layout([6, 5], None, "bfloat16", 16)
    check_buffer(layout, "BFloat16", 16)
    with pytest.raises(ValueError, match="buffer of float32 was given to a layout of bfloat16"):
        check_buffer(layout, "torch.float32", 16)
    with pytest.raises(ValueError, match="buffer of 11 elements was given to a layout of 16"):
        check_buffer(layout, "bfloat16", 11)


def test_tensors_of_different_dtypes_get_buffers_of_their_own():
    assert split_by([("bf16", 1), ("fp32", 2), ("bf16", 3)]) == {"bf16": [1, 3], "fp32": [2]}
