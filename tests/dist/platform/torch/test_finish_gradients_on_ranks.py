"""Gradients of which several ranks hold a part are completed, once, and then count once."""

from __future__ import annotations

import math

import pytest


def test_an_embedding_tied_across_stages_is_added_up_and_counts_once(on_ranks):
    results = on_ranks("finish_programs:tied_across_stages", 4)
    whole = [[20.0, 0.0], [0.0, 20.0]]
    for rank, result in enumerate(results):
        assert result["before"]["kind"] == "UnfinishedGradientsError"
        assert "finish_gradients(model, mesh)" in result["before"]["message"]
        assert result["first"] == result["again"] == [whole[rank % 2]]
        assert result["first: collectives"] == ["all_gather_single", "all_reduce"]  # the first time, lists are compared
        assert result["again: collectives"] == ["all_reduce"]
        assert result["collectives"] == ["all_gather_single"]
        # 800 of the embedding once, 9 + 16 on each stage
        assert result["norm"] == result["gradients only"] == pytest.approx(math.sqrt(850), rel=1e-7)
        assert result["contributed"] == [pytest.approx(v) for v in (409**0.5, 416**0.5, 3.0, 4.0)]
        (sharded, shared) = result["classes"]
        assert (shared[0], shared[2], shared[3]) == ("shared", 4, [0, 1])
        assert shared[1] == pytest.approx(math.sqrt(800), rel=1e-7)
        assert (sharded[0], sharded[2]) == ("sharded", 4)
        assert result["clipped twice"] == [pytest.approx(v, rel=2e-6) for v in (math.sqrt(850), 1.0, 0.5)]
        assert result["accumulated"]["kind"] == "UnfinishedGradientsError"


def test_the_tensor_parallel_reduction_is_in_float32_with_one_data_parallel_rank(on_ranks):
    """pytorch#190626: 1 + 2^-10, which bfloat16 rounds to 1."""
    for result in on_ranks("finish_programs:tensor_parallel_witness", 2):
        assert result["gradient"] == [1.0009765625] * 4
        assert result["placements"] == "(Shard(dim=0), Replicate())"
        assert result["norm"] == 2 * 1.0009765625


@pytest.mark.parametrize(
    ("missing", "frozen", "gradients", "norm"),
    [
        ([], [], [[6.0, 0.0]] * 3, 6.0),
        ([0], [], [[5.0, 0.0]] * 3, 5.0),
        ([0, 1, 2], [], [None] * 3, 0.0),
        ([], [0], [[1.0, 0.0], [5.0, 0.0], [5.0, 0.0]], 5.0),  # rank 1 counts
    ],
)
def test_every_trainable_copy_gets_the_sum(on_ranks, missing, frozen, gradients, norm):
    results = on_ranks("finish_programs:copies_without_gradient", 3, missing=missing, frozen=frozen)
    assert [result["gradient"] for result in results] == gradients
    assert [result["norm"] for result in results] == [norm] * 3


def test_main_grad_goes_before_grad_and_keeps_its_dtype(on_ranks):
    narrow = 1.0009765625
    for rank, result in enumerate(on_ranks("finish_programs:main_grads", 2)):
        assert result["torch.float32"] == ["torch.float32", narrow.hex()]
        assert result["torch.float32: grad"] == 7.0
        assert result["torch.float64"] == ["torch.float64", (1 + 2.0**-40).hex()]
        assert result["torch.float64: grad"] == (7.0 if rank == 0 else None)


def test_a_parameter_in_two_groups_is_added_up_over_both(on_ranks):
    for rank, result in enumerate(on_ranks("finish_programs:on_two_axes", 4)):
        assert result["sums"] == [4.0, 2.0]
        assert sorted(result["first"]) == ["all_gather_single"] * 2 + ["all_reduce"] * 2
        assert result["second"] == ["all_reduce"] * 2, rank


@pytest.mark.parametrize(("norm_type", "norm"), [(2, math.sqrt(75 + 144)), (1, 33.0), (math.inf, 12.0), (-math.inf, 0.0), (0, 7.0)])
def test_partial_gradients_are_measured_with_one_collective_more_and_stay_partial(on_ranks, norm_type, norm):
    for rank, result in enumerate(on_ranks("finish_programs:partial_gradients", 2, norm_type=norm_type)):
        assert result["norm"] == result["finished norm"] == pytest.approx(norm, rel=1e-7)
        assert result["clip"] == ["all_gather_single", "all_reduce"]  # three parameters, one reduction
        scale = min(1.0, 1.0 / (norm + 1e-6))
        part = [[1.0, 6.0], [2.0, -2.0]][rank]
        own = [[0.0], [12.0]][rank]
        assert result["clipped"] == [[pytest.approx(scale * v, rel=1e-6) for v in values] for values in [*[part] * 3, own]]
        assert result["placements"] == ["(Partial(sum),)"] * 3 + ["(Shard(dim=0),)"]
        assert result["finished"] == [*[[3.0, 4.0]] * 3, own]
        assert result["finished placements"] == ["(Replicate(),)"] * 3 + ["(Shard(dim=0),)"]
        assert result["again"] == ["all_reduce"]


def test_a_partial_gradient_on_one_rank_alone_hangs_nobody(on_ranks):
    results = on_ranks("finish_programs:partial_on_one_rank", 2)
    assert results[0]["clip"] == results[1]["clip"]
    assert "do not agree on which gradients are still to be summed" in results[0]["clip"]["message"]
    for result in results:
        assert (result["finished"], result["norm"]) == ([[3.0, 4.0]], 5.0)


def test_mistakes_are_told_to_every_rank_alike(on_ranks):
    results = on_ranks("finish_programs:errors", 2)
    told = results[0]
    for case in told:
        assert told[case] == results[1][case] or case == "too small a mesh", case
    assert told["sparse"]["kind"] == "ValueError"
    assert "rank 1: gradient 1 is sparse" in told["sparse"]["message"]
    assert all(result["untouched"] == [3.0, 4.0] for result in results)
    assert "rank 0 shares 2" in told["marked differently"]["message"]
    assert "rank 1 shares 1" in told["marked differently"]["message"]
    assert told["changed on one"]["kind"] == "UnfinishedGradientsError"
    assert "rank 1: the gradients of 1 parameters" in told["changed on one"]["message"]
    assert "complete on ranks [0]; a part on ranks [1]" in told["complete on one"]["message"]
    assert "one axis" in told["two axes"]["message"]
    assert "was complete and has changed since, on ranks [1]" in told["changed on one, again"]["message"]
    assert told["not a tensor"] == {"kind": "TypeError", "message": "rank 1: entry 1 of the list is a NoneType, not a tensor"}
    for rank, result in enumerate(results):
        assert f"parameters lie on ranks (0, 1), but mesh= spans only ranks ({rank},)" in result["too small a mesh"]["message"]
    assert "is sparse, or Partial by neither sum nor avg, on ranks [0, 1]" in told["sparse part"]["message"]
    assert "is sparse, or Partial by neither sum nor avg, on ranks [0]" in told["largest part"]["message"]
    assert "the gradients of 1 parameters (first: weight) are only this rank's part" in told["named"]["message"]


def test_a_complete_gradient_that_changed_in_place_is_not_added_up_again(on_ranks):
    for result in on_ranks("finish_programs:changed_in_place", 2):
        assert "whether it is a sum or a part cannot be told" in result["scaled"]["message"]
        assert "whether it is a sum or a part cannot be told" in result["accumulated"]["message"]
        assert (result["scaled: gradient"], result["accumulated: gradient"]) == ([1.0, 0.0], [3.0, 0.0])
        assert result["main_grad"] == [2.0, 0.0]


def test_complex_parts_are_added_up_with_their_imaginary_part(on_ranks):
    for result in on_ranks("finish_programs:complex_parts", 3):
        assert result["torch.complex64"] == result["torch.complex128"] == [[2.0, 4.0], [0.0, 6.0]]


def test_a_model_of_the_same_shapes_is_not_taken_for_the_one_before(on_ranks):
    for result in on_ranks("finish_programs:twins", 2):
        assert result["first"] == [pytest.approx(math.sqrt(2 * 16 * (9 + 16)), rel=1e-7)] * 2  # on each of two stages
        assert result["parts"]["kind"] == "UnfinishedGradientsError"
        assert result["second"] == 2 * math.sqrt(16 * (9 + 16)) == 40.0  # once, but from both stages
        assert result["first again"] == result["first"][0]


@pytest.mark.parametrize(
    ("case", "norm", "classes"),
    [
        ("one on each axis", math.sqrt(32), [["sharded", math.sqrt(32), 32]]),
        ("tensor parallel beside plain data parallel", math.sqrt(48), [["sharded", math.sqrt(48), 48]]),
        ("experts beside dense", math.sqrt(48), [["expert", math.sqrt(32), 32], ["sharded", 4.0, 16]]),
        ("flattened", math.sqrt(32), [["sharded", math.sqrt(32), 32]]),
    ],
)
def test_parameters_on_several_meshes_make_one_norm(on_ranks, case, norm, classes):
    for result in on_ranks("finish_programs:meshes", 4, case=case):
        assert result["norm"] == pytest.approx(norm, rel=1e-7)
        assert result["ranks"] == [0, 1, 2, 3]
        assert result["classes"] == [[name, pytest.approx(value), elements] for name, value, elements in classes]
        assert result["parameters"] == [[f"index {i}", pytest.approx(4.0), 16] for i in range(len(result["parameters"]))]


def test_a_mesh_that_was_cut_from_nothing_is_refused(on_ranks):
    for result in on_ranks("finish_programs:meshes", 4, case="of different ranks, cut from nothing"):
        assert result["error"]["kind"] == "ValueError"
        assert "cut the parameter's mesh out of one mesh of all these ranks" in result["error"]["message"]


def test_eight_hybrid_ranks_return_one_norm_and_hold_four(on_ranks):
    """gitcode issue 64, second part: every rank printed its local norm."""
    results = on_ranks("finish_programs:hybrid_of_eight", 8)
    local = [math.sqrt(a * a + (a + 1) ** 2) for a in (1, 3, 5, 7)]
    assert len({result["norm"].hex() for result in results}) == 1
    assert results[0]["norm"] == pytest.approx(math.sqrt(204), rel=1e-7)
    assert [result["local"] for result in results] == [pytest.approx(value, rel=1e-6) for value in local * 2]
    assert len(set(local)) == 4
    assert all(result["held"] == [pytest.approx(value, rel=1e-7) for value in local * 2] for result in results)
