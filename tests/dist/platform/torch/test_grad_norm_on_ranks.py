"""The gradient norm on real ranks: every element once, the same bits everywhere, and no rank left waiting."""

from __future__ import annotations

import math

import pytest

from hyper_parallel.core.sharding import shard_shape


def the_same(results, key="norm"):
    """The value that all ranks hold, bit for bit."""
    values = [result[key] for result in results]
    assert len({value.hex() for value in values}) == 1, values
    return values[0]


def test_a_replicated_parameter_counts_once_beside_a_sharded_one(on_ranks):
    ones = [[1.0] * 4] * 4
    results = on_ranks("norm_programs:placed_by_hand", 4, sizes=[4], gradients=[(ones, "S0"), ([1.0] * 4, "R")])
    assert the_same(results) == pytest.approx(math.sqrt(20), rel=1e-7)  # all squares added up would give sqrt(32)
    assert results[0]["held"] == [pytest.approx(math.sqrt(8))] * 4
    assert results[0]["contributed"] == [pytest.approx(math.sqrt(8)), 2.0, 2.0, 2.0]


def test_hybrid_sharding_counts_each_replica_once(on_ranks):
    results = on_ranks("norm_programs:placed_by_hand", 4, sizes=[2, 2], gradients=[([1.0, 2.0, 3.0, 4.0], "R S0")])
    assert the_same(results) == pytest.approx(math.sqrt(30), rel=1e-7)  # counted twice: sqrt(60)
    for result in results:
        assert result["held"] == [pytest.approx(n) for n in (5**0.5, 5.0, 5**0.5, 5.0)]
        assert result["contributed"] == [pytest.approx(5**0.5), 5.0, 0.0, 0.0]
        assert result["replicas_differ"] == []
    assert results[3]["clipped"] == [[pytest.approx(3 / 30**0.5), pytest.approx(4 / 30**0.5)]]


def test_sharded_over_both_axes(on_ranks):
    results = on_ranks("norm_programs:placed_by_hand", 4, sizes=[2, 2], gradients=[([[3.0, 4.0], [0.0, 12.0]], "S0 S1")])
    assert the_same(results) == 13.0


def test_a_dense_parameter_beside_parts_of_very_different_size(on_ranks):
    results = on_ranks("norm_programs:replicated_beside_local", 2, replicated=[4.0], local=[[40.0], [0.4]])
    assert the_same(results) == pytest.approx(40.201493, rel=1e-7)  # by rank it would be 40.199502 and 4.019950
    assert [result["clipped"][0] for result in results] == [[pytest.approx(4 / 40.201493, rel=1e-6)]] * 2


def test_norms_of_ranks_are_not_averaged(on_ranks):
    results = on_ranks("norm_programs:replicated_beside_local", 2, replicated=[0.0], local=[[2.0, 4.0], [6.0, 8.0]])
    assert the_same(results) == pytest.approx(10.954451, rel=1e-7)  # squares 20 and 100; the mean is 7.236068


def test_plain_parameters_beside_sharded_ones_count_once(on_ranks):
    gradients = [([1.0, 2.0, 3.0, 4.0], "R S0"), ([3.0, 5.0], "plain"), (6.0, "plain")]
    results = on_ranks("norm_programs:placed_by_hand", 4, sizes=[2, 2], gradients=gradients)
    assert the_same(results) == 10.0  # 30 + 34 + 36
    assert [r["clipped"][1] for r in results] == [[pytest.approx(0.3, rel=1e-6), pytest.approx(0.5, rel=1e-6)]] * 4


def test_meshes_are_known_by_their_ranks_and_not_by_the_root_they_were_cut_from(on_ranks):
    results = on_ranks("norm_programs:equal_meshes_of_two_roots", 4)
    assert the_same(results) == 5.0  # 1 + 4 + 4 + 16
    assert results[3]["ranks"] == [0, 1, 2, 3]


def test_uneven_and_empty_shards_for_every_order(on_ranks):
    orders = [2, 1, 3, 0.5, "inf", "-inf", 0]
    n = range(1, 12)
    expected = [
        math.sqrt(506),
        66.0,
        sum(x**3 for x in n) ** (1 / 3),
        sum(x**0.5 for x in n) ** 2,
        11.0,
        1.0,  # FSDP2 pads with zeros, which are no gradient
        11.0,
    ]
    for world_size in (1, 4):
        results = on_ranks("norm_programs:uneven_and_empty_shards", world_size, norm_types=orders)
        assert all(result == results[0] for result in results)
        assert results[0]["norms"] == [pytest.approx(value, rel=1e-7) for value in expected]
        assert results[0]["clipped"] == [pytest.approx(math.sqrt(506), rel=1e-7), pytest.approx(1.0, rel=1e-6)]


def test_the_norm_does_not_depend_on_where_the_gradients_lie(on_ranks):
    results = on_ranks("norm_programs:ways_to_hold_a_gradient", 3)
    one = pytest.approx(math.sqrt(506), rel=1e-7)
    assert all(result == results[0] for result in results)
    assert results[0] == {
        "one buffer": one,
        "generator": one,
        "get_total_norm": one,
        "clones": one,
        "none": 0.0,
        "second step, twice as large": pytest.approx(2 * math.sqrt(506), rel=1e-7),
        "accumulated": pytest.approx(3 * math.sqrt(506), rel=1e-7),
        "main_grad": one,
    }


@pytest.mark.parametrize("where", ["from the start", "in step 2"])
def test_a_buffer_is_trusted_only_while_its_padding_is_zero(on_ranks, where):
    results = on_ranks("norm_programs:spoiled_padding", 2, where=where)
    assert all(result["one storage"] for result in results)
    assert [result["size"] for result in results] == [5, 5]  # chunks of 3 and 2
    for result in results:
        assert result["step 1"] == result["step 2"] == pytest.approx(math.sqrt(204), rel=1e-7)  # 1 ... 8
        assert result["minimum 1"] == result["minimum 2"] == 1.0
        assert result["part of the list"] == pytest.approx(math.sqrt(55), rel=1e-7)
    assert [result["left alone"] for result in results] == [[[6.0, 7.0]], [[8.0]]]


@pytest.mark.parametrize(
    ("case", "norm", "contributed"),
    [
        ("none", 21**0.5, [15**0.5, 6**0.5, 0, 0]),
        ("one rank of a sharded parameter", 17**0.5, [15**0.5, 2**0.5, 0, 0]),
        ("the replica that would count", 21**0.5, [2**0.5, 2**0.5, 13**0.5, 2.0]),
        ("one rank without any", 21**0.5, [15**0.5, 6**0.5, 0, 0]),
        ("everywhere but on rank 2", 15**0.5, [0, 0, 15**0.5, 0]),
        ("everywhere", 0.0, [0, 0, 0, 0]),
        ("all frozen on rank 1", 21**0.5, [15**0.5, 0, 0, 6**0.5]),  # rank 3 holds what rank 1 does not train
    ],
)
def test_a_missing_gradient_hangs_nobody_and_the_lowest_holder_counts(on_ranks, case, norm, contributed):
    """W (1, 1 | 1, 1) and U (2 | 2) sharded over two ranks, V (3) replicated, all on two replicas: 4 + 8 + 9."""
    results = on_ranks("norm_programs:gradients_missing", 4, case=case)
    assert the_same(results) == pytest.approx(norm, rel=1e-7)
    assert results[0]["contributed"] == [pytest.approx(value, rel=1e-7) for value in contributed]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("a shape differs", ["rank 2 lists other", "index 1", "rank 0 has (2,)", "rank 2 has (3,)"]),
        ("one is left out", ["rank 0 lists other", "index 1", "rank 0 has nothing (its list ends after 1)"]),
        ("another order", ["rank 1 lists other", "index 0", "rank 0 has (4,)", "rank 1 has (2,)"]),
        ("only those with gradients", ["rank 1 lists other", "index 1", "nothing"]),
    ],
)
def test_lists_that_differ_are_named_on_every_rank(on_ranks, case, named):
    results = on_ranks("norm_programs:error_of", 4, case=case)
    assert [result["kind"] for result in results] == ["GradientMismatchError"] * 4
    assert len({result["message"] for result in results}) == 1
    assert all(text in results[0]["message"] for text in named), results[0]["message"]


@pytest.mark.parametrize(
    ("case", "norm", "named"),
    [
        ("nan in a shard", "nan", "rank 2: first"),
        ("inf on a replica that does not count", "nan", "rank 3: second"),
        ("beyond float32", "inf", "none alone, the norm itself overflows"),
    ],
)
def test_a_norm_that_is_not_finite_is_so_on_every_rank_and_named(on_ranks, case, norm, named):
    results = on_ranks("norm_programs:error_of", 4, case=case)
    assert [result["norm"] for result in results] == [norm] * 4
    assert all(result["untouched"] for result in results)
    assert [result["kind"] for result in results] == ["NonFiniteNormError"] * 4
    assert len({result["message"] for result in results}) == 1
    assert named in results[0]["message"]
    assert "Nothing was clipped" in results[0]["message"]


def test_replicas_that_differ_are_reported(on_ranks):
    results = on_ranks("norm_programs:replicas_that_differ", 4)
    assert the_same(results) == 2.0
    assert all(result["replicas_differ"] == [[1, 3]] for result in results)


def test_the_norm_has_one_dtype_on_all_ranks(on_ranks):
    results = on_ranks("norm_programs:float64_on_one_rank", 2)
    assert the_same(results) == 5.0
    assert [result["dtype"] for result in results] == ["torch.float64"] * 2


def test_scopes(on_ranks):
    results = on_ranks("norm_programs:scopes", 4, whole=[2, 2])
    sub = [result["sub-mesh"] for result in results]
    assert [told["norm"] for told in sub] == [pytest.approx(5**0.5)] * 2 + [5.0] * 2
    assert [told["ranks"] for told in sub] == [[0, 1]] * 2 + [[2, 3]] * 2
    cube = [result["two axes of three"] for result in results]
    assert [told["ranks"] for told in cube] == [[0, 1]] * 2 + [[2, 3]] * 2
    assert [told["norm"] for told in cube] == [1.0] * 4
    for result in results:
        assert result["reversed"]["norm"] == pytest.approx(14**0.5)
        assert result["reversed"]["held"] == [0.0, 1.0, 2.0, 3.0]  # in the order of the ranks, not of the mesh
        assert result["DeviceMesh"]["norm"] == result["ParallelMesh"]["norm"] == pytest.approx(30**0.5)
        assert result["empty on 0"]["norm"] == result["empty on 1"]["norm"] == 5.0
        assert result["empty on 0"]["contributed"] == [0.0, 5.0, 0.0, 0.0]
        assert result["empty on 1"]["with_gradient"] == [1, 0, 1, 1]
        assert result["nothing anywhere"]["norm"] == 0.0
        assert "lie on ranks (0, 1, 2, 3), but mesh= spans only ranks (" in result["too small"]


def test_a_scope_of_two_axes_out_of_three(on_ranks):
    results = on_ranks("norm_programs:scopes", 8, whole=[2, 4])
    cube = [result["two axes of three"] for result in results]
    assert [told["ranks"] for told in cube] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [told["norm"] for told in cube] == [pytest.approx(2**0.5)] * 8


def test_one_hundred_million_sharded_elements(on_ranks):
    results = on_ranks("norm_programs:hundred_million", 4, elements=100_000_000)
    assert the_same(results) == pytest.approx(math.sqrt(sum(result["squares"] for result in results)), rel=1e-7)


def test_a_zero_dimensional_parameter_stays_so_for_forward_and_tied(on_ranks):
    results = on_ranks("norm_programs:scalars", 3)
    for rank, result in enumerate(results):
        x = rank + 1
        assert result["seen"] == [[]] * 4
        assert result["names"] == ["0.scale", "0.weight", "1.weight"]
        assert result["y"] == result["again"] == 2 * (2 * x + 3) + 3
        # summed over x = 1, 2, 3: 2 s x + 3, s, 1
        assert result["gradients"] == {"0.scale": [33.0], "0.weight": [6.0], "1.weight": [3.0]}
        assert result["norm"] == pytest.approx(math.sqrt(33**2 + 36 + 9), rel=1e-7)


def test_a_tied_weight_counts_once_and_is_scaled_once(on_ranks):
    results = on_ranks("norm_programs:tied", 2)
    assert the_same(results) == pytest.approx(math.sqrt(800), rel=1e-7)
    assert the_same(results, "clipped") == pytest.approx(1.0, rel=1e-6)


def test_a_sharded_model_can_be_converted_after_its_norm_was_taken(on_ranks):
    for result in on_ranks("norm_programs:converted_in_place", 2):
        assert result["norms"] == [pytest.approx(30**0.5), pytest.approx(120**0.5)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_shard_rule_is_that_of_fsdp2(on_ranks, world_size):
    shapes = [[8, 2], [7, 3], [5], [3, 2], [2], [1], [1, 9], [16], [6, 5, 4]]
    for rank, local in enumerate(on_ranks("norm_programs:local_shapes", world_size, shapes=shapes)):
        assert [tuple(shape) for shape in local] == [shard_shape(tuple(s), 0, world_size, rank) for s in shapes]
