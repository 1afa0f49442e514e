"""Groups of ranks, their links, and what a person writes for an amount of memory."""

from __future__ import annotations

import pytest
import typer

from hpcli.options import byte_count
from hpcli.plan.groups import drawing, example_group, link
from hpcli.report.formats import bytes_text
from hyper_parallel import ParallelMesh

MESH = ParallelMesh(pp=2, dp_shard=4, ep=2, tp=2)


@pytest.mark.parametrize(
    ("axis", "group"),
    [("tp", [6, 7]), ("dp_shard", [0, 2, 4, 6]), ("ep", [4, 6]), ("dpm", [2, 6]), ("pp", [6, 14]), ("all", list(range(16)))],
)
def test_the_group_of_rank_6_on_each_axis(axis, group):
    assert example_group(MESH, axis, 6) == group


@pytest.mark.parametrize("axis", ["tp", "dp_shard", "pp"])
def test_groups_are_those_of_the_mesh(axis):
    for ranks in MESH.groups(axis):
        assert all(example_group(MESH, axis, rank) == list(ranks) for rank in ranks)


def test_hosts_take_ranks_in_their_order():
    assert link([4, 5, 6, 7], 4) == "within a host" and link([3, 4], 4) == "between hosts"


def test_a_small_mesh_is_drawn_with_tensor_parallel_neighbours_side_by_side():
    assert drawing(MESH) == ["pp 0  [ 0  1] [ 2  3] [ 4  5] [ 6  7]", "pp 1  [ 8  9] [10 11] [12 13] [14 15]"]


@pytest.mark.parametrize(
    ("written", "count"),
    [("64GiB", 64 * 2**30), ("80GB", 80 * 10**9), ("1.5 TiB", 3 * 2**39), ("4096", 4096), ("80e9", 80 * 10**9), ("16k", 16000)],
)
def test_amounts_of_memory_are_read(written, count):
    assert byte_count(written) == count


@pytest.mark.parametrize("written", ["", "GiB", "-1GiB", "0", "1.2.3MB", "64 gigs"])
def test_what_is_no_amount_of_memory_is_refused(written):
    with pytest.raises(typer.BadParameter, match="no amount of memory"):
        byte_count(written)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (10239, "10.0 KiB"), (1023 * 1024, "1,023 KiB"), (2**40, "1.00 TiB"), (5 * 2**52, "20,480 TiB")],
)
def test_bytes_have_three_digits_and_a_unit(count, text):
    assert bytes_text(count) == text
