"""Exported weights: put together from shards, whole or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hpcli.checkpoint import folder
from hpcli.checkpoint.errors import CheckpointError
from hpcli.checkpoint.export import export_weights

WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)


def checkpoint(directory, *, tied=False, shards=((0, 2), (2, 3))):
    """Rows 0 and 1 of `embedding.weight` in one file, row 2 in another."""
    made = folder.begin(directory, 1)
    for number, (start, stop) in enumerate(shards):
        rows = {"model.embedding.weight": WEIGHT[start:stop], "optimizer.exp_avg.embedding.weight": WEIGHT[start:stop]}
        place = json.dumps({key: {"saved_offsets": [start, 0]} for key in rows})
        save_file(rows, made / f"shard-{number}.safetensors", metadata={"DCP_SHARDING_INFO": place})
    config = {"model": {"tie_embeddings": tied}}
    return folder.publish(made, {"step": 1, "config": config, "model": {"embedding.weight": [3, 2]}})


def test_shards_become_one_tensor_and_only_weights_are_written(tmp_path):
    checkpoint(tmp_path)
    assert export_weights(tmp_path, tmp_path / "w.safetensors") == {"embedding.weight": (3, 2)}
    written = load_file(tmp_path / "w.safetensors")
    assert list(written) == ["embedding.weight"]
    np.testing.assert_array_equal(written["embedding.weight"], WEIGHT)


def test_a_tied_output_projection_is_written_too(tmp_path):
    checkpoint(tmp_path, tied=True)
    export_weights(tmp_path, tmp_path / "w.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["head.weight"], WEIGHT)


def test_a_shard_that_is_not_there_is_missed(tmp_path):
    checkpoint(tmp_path, shards=((0, 2),))
    with pytest.raises(CheckpointError, match="4 of 6 elements of embedding.weight"):
        export_weights(tmp_path, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot write"):
        export_weights(tmp_path, tmp_path / "absent" / "w.safetensors")
