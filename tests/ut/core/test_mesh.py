"""Axes and sizes: which rank sits where, which ranks form a group, what must divide what."""

from __future__ import annotations

from itertools import chain

import pytest

from hyper_parallel.core.mesh import (
    AXES,
    LayoutError,
    LayoutProblem,
    ParallelMesh,
    check_batch,
    check_divisible,
    check_experts,
    check_transformer,
    divisors,
    resolve_mesh,
)


def test_ranks_are_numbered_row_major_with_tensor_parallel_neighbours_adjacent():
    mesh = ParallelMesh(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    positions = [tuple(mesh.coordinates(rank).values()) for rank in range(8)]
    # pp, dp_replicate, dp_shard, tp
    assert positions == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (0, 0, 1, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
        (1, 0, 1, 0),
        (1, 0, 1, 1),
    ]


def test_rank_at_is_the_inverse_of_coordinates():
    mesh = ParallelMesh(pp=2, dp_replicate=3, dp_shard=4, tp=5)
    assert [mesh.rank_at(**mesh.coordinates(rank)) for rank in range(120)] == list(range(120))
    assert mesh.rank_at() == 0
    assert mesh.rank_at(dp_replicate=1) == 20


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_mesh_is_refused(rank):
    with pytest.raises(IndexError, match=f"rank {rank} is not on a mesh of 8 ranks"):
        ParallelMesh(dp_shard=8).coordinates(rank)


def test_groups_of_hybrid_sharding_are_rows_and_columns():
    mesh = ParallelMesh(dp_replicate=2, dp_shard=4)
    assert mesh.groups("dp_shard") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups("dp_replicate") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups("dp_replicate", "dp_shard") == [tuple(range(8))]
    assert mesh.groups("tp") == [(rank,) for rank in range(8)]


def test_groups_do_not_depend_on_the_order_in_which_axes_are_named():
    mesh = ParallelMesh(pp=2, dp_shard=3, tp=2)
    assert mesh.groups("tp", "pp") == mesh.groups("pp", "tp") == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]


@pytest.mark.parametrize("axes", [("pp",), ("tp",), ("dp_shard", "tp"), AXES, ()])
def test_groups_partition_all_ranks(axes):
    mesh = ParallelMesh(pp=2, dp_replicate=2, dp_shard=3, tp=2)
    groups = mesh.groups(*axes)
    assert sorted(chain(*groups)) == list(range(24))
    assert all(list(group) == sorted(group) for group in groups)


def test_data_parallel_ranks_differ_by_data_and_not_by_tensor_or_stage():
    mesh = ParallelMesh(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert mesh.data_parallel_size == 4
    assert [mesh.data_parallel_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_active_axes_are_those_of_more_than_one_rank():
    assert ParallelMesh(dp_replicate=2, dp_shard=4).active_axes == ("dp_replicate", "dp_shard")
    assert ParallelMesh(tp=2, pp=2).active_axes == ("pp", "tp")
    assert ParallelMesh().active_axes == ("dp_shard",)


def test_minus_one_takes_the_ranks_that_the_other_degrees_leave():
    assert resolve_mesh(8, dp_shard=-1) == ParallelMesh(dp_shard=8)
    assert resolve_mesh(16, pp=2, tp=2, dp_shard=-1) == ParallelMesh(pp=2, tp=2, dp_shard=4)
    assert resolve_mesh(4, dp_replicate=4, dp_shard=-1) == ParallelMesh(dp_replicate=4)


def test_expert_parallelism_is_carved_out_of_the_sharded_ranks_and_multiplies_none():
    mesh = resolve_mesh(8, dp_shard=8, ep=4)
    assert (mesh.world_size, mesh.ep) == (8, 4)
    with pytest.raises(LayoutError, match="expert_parallel 3 must divide data_parallel_shard 8.*: 1, 2, 4, 8"):
        resolve_mesh(8, dp_shard=8, ep=3)


@pytest.mark.parametrize(
    ("world_size", "degrees", "words"),
    [
        (8, {"dp_shard": 3}, ["makes 3 ranks", "the run has 8", "8 (or -1) would use all 8", "with 3 ranks"]),
        (8, {"dp_shard": 2, "tp": 2}, ["makes 4 ranks", "data_parallel_shard: 4 (or -1)"]),
        (8, {"tp": 3, "dp_shard": 2}, ["makes 6 ranks", "tensor_parallel 3", "must divide 8"]),
        (2, {}, ["every degree 1 makes 1 rank,", "2 (or -1) would use all 2", "with 1 rank"]),
        (8, {"tp": 3, "dp_shard": -1}, ["multiples of 3", "use 6 or 9 ranks"]),
        (4, {"tp": 8, "dp_shard": -1}, ["multiples of 8", "use 8 ranks"]),
    ],
)
def test_a_product_that_is_not_the_number_of_ranks_is_refused_with_what_would_work(world_size, degrees, words):
    with pytest.raises(LayoutError) as caught:
        resolve_mesh(world_size, **degrees)
    (problem,) = caught.value.problems
    assert problem.key == "data_parallel_shard"
    assert all(word in problem.message for word in words), problem.message


def test_every_degree_below_one_is_reported():
    with pytest.raises(LayoutError) as caught:
        resolve_mesh(8, pp=0, dp_shard=-2, tp=-1)
    assert {(p.key, p.value) for p in caught.value.problems} == {
        ("pipeline_parallel", 0),
        ("data_parallel_shard", -2),
        ("tensor_parallel", -1),
    }
    assert "or -1 to fill" in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", None])
def test_a_mesh_refuses_a_degree_that_is_no_number_of_ranks(size):
    with pytest.raises(LayoutError, match="tensor_parallel: must be a whole number of at least 1"):
        ParallelMesh(tp=size)


def test_divisors_are_all_of_them_ascending():
    assert divisors(1) == [1]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(16) == [1, 2, 4, 8, 16]


def test_the_divisibility_message_offers_the_nearest_multiples():
    assert check_divisible("model.num_heads", 8, "tensor_parallel", 4) is None
    key, value, message = check_divisible("model.num_heads", 6, "tensor_parallel", 4)
    assert (key, value) == ("model.num_heads", 6)
    assert message == "6 is not divisible by tensor_parallel 4; 4 or 8 would work, or change tensor_parallel"
    assert "; 4 would work" in check_divisible("model.num_heads", 3, "tensor_parallel", 4).message


@pytest.mark.parametrize(
    ("batch", "micro", "keys"),
    [
        (24, None, []),
        (24, 3, []),
        (24, 6, []),
        (25, None, ["training.global_batch_size"]),
        (24, 4, ["training.micro_batch_size"]),
        (24, 7, ["training.micro_batch_size"]),
    ],
)
def test_the_batch_splits_over_data_parallel_ranks_and_micro_batches(batch, micro, keys):
    mesh = ParallelMesh(dp_replicate=2, dp_shard=2, tp=2)
    assert [problem.key for problem in check_batch(mesh, batch, micro)] == keys


def test_the_micro_batch_message_names_the_values_that_would_work():
    (problem,) = check_batch(ParallelMesh(dp_shard=4), 24, 4)
    assert "6 sequences" in problem.message
    assert problem.message.endswith("values that would work: 1, 2, 3, 6")


SIZES = {"cut": {"heads": 4, "kv": 2, "ffn": 192}, "sequence": 64, "num_layers": 4}


@pytest.mark.parametrize(
    ("mesh", "options", "keys"),
    [
        (ParallelMesh(tp=2, pp=2), {"sequence_parallel": True, "interleave": 2}, []),
        (ParallelMesh(tp=4), {}, ["kv"]),
        (ParallelMesh(tp=2), {"sequence": 63}, []),
        (ParallelMesh(tp=2), {"sequence": 63, "sequence_parallel": True}, ["training.seq_length"]),
        (ParallelMesh(pp=4), {"interleave": 2}, ["model.num_layers"]),
        (ParallelMesh(), {"interleave": 2, "num_layers": 3}, []),
        (ParallelMesh(tp=3), {}, ["heads", "kv"]),
        (ParallelMesh(tp=2), {"vocabulary": 257}, []),  # 129 and 128: a piece may be shorter
        (ParallelMesh(tp=4), {"cut": {}, "vocabulary": 6}, ["model.vocab_size"]),  # 2, 2, 2 and none
        (ParallelMesh(), {"vocabulary": 1}, []),
    ],
)
def test_what_tensor_sequence_and_pipeline_parallelism_demand(mesh, options, keys):
    problems = check_transformer(mesh, **(SIZES | options))
    assert [problem.key for problem in problems] == keys
    assert all(isinstance(problem, LayoutProblem) for problem in problems)


def test_a_vocabulary_that_leaves_ranks_empty_is_told_the_next_that_divides():
    (problem,) = check_transformer(ParallelMesh(tp=28), **(SIZES | {"cut": {}}), vocabulary=256)
    assert problem == LayoutProblem(
        "model.vocab_size",
        256,
        "256 cut over tensor_parallel 28 makes pieces of 10, and the last of them would be empty; "
        "280 would work, or change tensor_parallel",
    )


def test_the_positions_of_an_image_count_in_the_sequence_that_is_split():
    def problems(sequence: int) -> list[LayoutProblem]:
        return check_transformer(
            ParallelMesh(tp=4), **(SIZES | {"cut": {}, "sequence": sequence}), image_positions=6, sequence_parallel=True
        )

    assert problems(10) == []
    (problem,) = problems(12)
    assert problem.key == "training.seq_length"
    assert problem.message == (
        "12, and the 6 positions of the image before it, make 18, which is not divisible by tensor_parallel 4; "
        "10 or 14 would work, or change tensor_parallel"
    )
    assert "; 2 would work" in problems(1)[0].message


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        (ParallelMesh(dp_shard=8, ep=4, tp=2), []),
        (ParallelMesh(dp_shard=3, ep=3), ["model.num_experts"]),
        (ParallelMesh(tp=5), ["model.expert_ffn_size"]),
        (ParallelMesh(dp_shard=6, ep=2), ["model.hidden_size"]),  # an expert's 64 columns over 3 ranks
    ],
)
def test_experts_are_cut_evenly(mesh, keys):
    problems = check_experts(mesh, num_experts=8, expert_ffn_size=48, hidden_size=64)
    assert [problem.key for problem in problems] == keys
