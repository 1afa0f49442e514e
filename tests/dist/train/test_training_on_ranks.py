"""Training on real ranks: the layout, offload, micro-batches and units change where things are, not what they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from hpcli.config.schema import Config
from hpcli.models.description import describe_model

MODEL = {
    "preset": "decoder-tiny",
    "vocab_size": 256,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 50,
    "rope_theta": 10_000.0,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
}

# with this seed one sequence of the first batch is the end of a text, so that valid tokens differ between ranks
TRAINING = {"global_batch_size": 24, "seq_length": 32, "seed": 4, "max_norm": 0.5}

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(on_ranks) -> Train:
    """``train(mesh, steps, section={key: value})``: the results of each rank, which agree on losses and norms."""

    def run(mesh: dict[str, int], steps: int = 1, **sections: dict[str, Any]) -> list[dict[str, Any]]:
        config = {
            "model": MODEL | sections.pop("model", {}),
            "training": TRAINING | sections.pop("training", {}),
            "optimizer": {"lr": 3e-3} | sections.pop("optimizer", {}),
            **sections,
        }
        world_size = math.prod(mesh.values())
        results = on_ranks("train_programs:train", world_size, config=config, mesh=mesh, steps=steps)
        for result in results:
            for key in ("losses", "norms", "weights"):
                assert result[key] == results[0][key], key
            assert all(math.isfinite(value) for value in (*result["losses"], *result["norms"]))
        return results

    return run


@pytest.fixture(scope="module")
def on_one_rank(on_ranks) -> dict[str, Any]:
    """Two steps of the default configuration on one rank."""
    config = {
        "model": MODEL,
        "training": TRAINING,
        "optimizer": {"lr": 3e-3},
    }
    return on_ranks("train_programs:train", 1, config=config, mesh={"dp_shard": 1}, steps=2)[0]


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-6)


def test_one_rank_starts_at_the_entropy_of_a_uniform_guess(on_one_rank):
    assert on_one_rank["losses"][0] == pytest.approx(math.log(256), abs=0.05)
    assert on_one_rank["norms"][0] > 0.5  # so that clipping takes part in what follows
    assert all(on_one_rank["changed"].values())
    sizes = [math.prod(spec.shape) for spec in describe_model(Config.model_validate({"model": MODEL}).model).values()]
    assert on_one_rank["parameter_count"] == sum(sizes)


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2},
        {"dp_shard": 3},
        {"dp_shard": 4},
        {"dp_shard": 8},
        {"dp_replicate": 2, "dp_shard": 1},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 4},
    ],
    ids=str,
)
def test_loss_and_norm_do_not_depend_on_the_ranks(train, on_one_rank, mesh):
    results = train(mesh, 2)
    valid = [sum(result["valid"][0]) for result in results]
    assert len(set(valid)) > 1, "ranks with equal numbers of valid tokens would hide a mean of means"
    assert sum(valid) == sum(on_one_rank["valid"][0])
    assert results[0]["losses"][:1] == close(on_one_rank["losses"][:1])
    assert results[0]["norms"][:1] == close(on_one_rank["norms"][:1])
    assert results[0]["losses"][1] == pytest.approx(on_one_rank["losses"][1], rel=1e-5)


def test_on_two_replicas_of_four_shards_the_table_shows_four_local_norms_twice_and_one_global(train):
    results = train({"dp_replicate": 2, "dp_shard": 4})
    rows = [result["rows"][0] for result in results]
    assert len({row["global_norm"].hex() for row in rows}) == 1
    local = [row["local_norm"] for row in rows]
    assert len(set(local)) == 4
    assert local[:4] == local[4:]
    assert [row["contributed"] for row in rows] == local[:4] + [0.0] * 4
    assert math.hypot(*local[:4]) == pytest.approx(rows[0]["global_norm"], rel=1e-7)
    assert {(row["with_gradient"], row["without_gradient"]) for row in rows} == {(21, 0)}


@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_offload_changes_not_one_bit(train, mesh, dtypes):
    training = dict(zip(("params_dtype", "compute_dtype"), dtypes, strict=True)) | {"micro_batch_size": 3}
    here, offloaded = (
        train(mesh, 3, training=training, fsdp_config={"enable_offload": on})[0] for on in (False, True)
    )
    for key in ("losses", "norms", "weights"):
        assert here[key] == offloaded[key], key


def test_a_run_reproduces_itself_bit_for_bit(train):
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    first, second = (train(mesh, 3, training={"compute_dtype": "bfloat16"})[0] for _ in range(2))
    assert first == second
    assert train(mesh, 1, training={"seed": 1})[0]["weights"] != first["weights"]


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_micro_batches_are_one_batch(train, on_one_rank, micro_batch_size):
    results = train({"dp_shard": 2}, training={"micro_batch_size": micro_batch_size})
    assert [len(result["valid"][0]) for result in results] == [12 // micro_batch_size] * 2
    assert len({n for result in results for n in result["valid"][0]}) > 1
    assert results[0]["losses"] == close(on_one_rank["losses"][:1])
    assert results[0]["norms"] == close(on_one_rank["norms"][:1])


@pytest.mark.parametrize("unit", ["layer", "model"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_units_recomputation_and_resharding_change_nothing(train, on_one_rank, unit, checkpointing, reshard_after_forward):
    result = train(
        {"dp_shard": 2},
        2,
        training={"activation_checkpointing": checkpointing},
        fsdp_config={"unit": unit, "reshard_after_forward": reshard_after_forward},
    )[0]
    assert result["units"] == {"layer": 3, "model": 1}[unit]
    assert result["losses"] == close(on_one_rank["losses"])
    assert result["norms"] == close(on_one_rank["norms"])


def test_units_agree_in_bfloat16_too(train):
    """Shards that are rounded after a unit was made must be those that the unit gathers."""
    dtypes = {"params_dtype": "bfloat16", "compute_dtype": "bfloat16"}
    layer, model, auto = (
        train({"dp_shard": 2}, 3, training=dtypes, fsdp_config={"unit": unit})[0] for unit in ("layer", "model", "auto")
    )
    for key in ("losses", "norms", "weights"):
        assert layer[key] == model[key] == auto[key], key


@pytest.mark.parametrize("unit", ["layer", "model"])
def test_frozen_and_tied_weights(train, unit):
    frozen = ["layers.0.*", "norm.weight"]  # a unit of its own without a gradient, and a part of the root's
    model = {"tie_embeddings": True, "freeze": frozen}
    one, two = (train({"dp_shard": n}, 2, model=model, fsdp_config={"unit": unit})[0] for n in (1, 2))
    assert {name for name, changed in one["changed"].items() if not changed} == {
        name for name in one["changed"] if name.startswith("layers.0.") or name == "norm.weight"
    }
    assert "head.weight" not in one["changed"]
    assert one["changed"] == two["changed"]
    assert two["losses"] == close(one["losses"])
    assert two["norms"] == close(one["norms"])
    assert two["rows"][0]["with_gradient"] == 10  # the embedding and layers.1


def test_bfloat16_storage_with_float32_compute(train):
    """What the model sees is bfloat16; the master weights behind it keep what rounding would lose."""
    dtypes = {"params_dtype": "bfloat16", "compute_dtype": "float32"}
    result = train({"dp_shard": 2}, 8, training=dtypes, optimizer={"lr": 1e-3})[0]
    assert result["bfloat16"]
    assert not result["masters are rounded"]
    assert result["dtypes"] == ["torch.float32"]
    assert result["losses"][-1] < result["losses"][0] - 0.05
    tiny = train({"dp_shard": 2}, 8, training=dtypes, optimizer={"lr": 1e-5})[0]
    assert tiny["bfloat16"]
    assert not tiny["masters are rounded"]


def test_the_loss_falls_with_plain_gradient_descent_too(train):
    result = train({"dp_shard": 2}, 8, optimizer={"name": "sgd", "lr": 1.0, "weight_decay": 0.0})[0]
    assert result["losses"][-1] < result["losses"][0] - 0.1
    assert all(result["changed"].values())


@pytest.mark.parametrize(("norm_type", "largest"), [(1.0, False), (math.inf, True)])
def test_other_norms_do_not_depend_on_the_ranks_either(train, norm_type, largest):
    one, two = (train({"dp_shard": n}, training={"norm_type": norm_type})[0] for n in (1, 3))
    assert two["norms"] == close(one["norms"])
    assert (one["norms"][0] < 0.5) is largest


def test_a_learning_rate_of_zero_changes_no_weight(train):
    result = train({"dp_shard": 2}, 1, optimizer={"lr": 0.0})[0]
    assert result["skipped"] == [None]
    assert not any(result["changed"].values())


def test_a_step_whose_norm_is_not_finite_is_skipped_on_all_ranks_alike(on_ranks):
    """A loss that is NaN on one rank only."""
    config = {"model": MODEL, "training": TRAINING, "optimizer": {"lr": 3e-3}}
    results = on_ranks("train_programs:train", 2, config=config, mesh={"dp_shard": 2}, steps=2, spoiled_rank=1)
    for result in results:
        assert [math.isfinite(norm) for norm in result["norms"]] == [False, True]
        assert result["skipped"] == ["the gradient norm is nan; the weights were left as they are", None]
        assert all(result["changed"].values())
    assert results[0]["weights"] == results[1]["weights"]


def test_ranks_do_not_inherit_the_mesh_of_the_warm_up(train):
    """Torch finds the layout of a DTensor operation again by the mesh's ranks alone, whatever rank this process was."""
    results = train({"dp_shard": 2}, model={"hidden_size": 16, "num_layers": 1, "ffn_size": 16})
    for rank, result in enumerate(results):
        assert all(coordinate == [rank] or coordinate == (rank,) for coordinate in result["mesh_coordinates"])
