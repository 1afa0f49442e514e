"""The reference: three gradients in one pass over the sequences, and what is said when they cannot be written."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import numpy as np
import pytest

from hpcli.check import reference
from hpcli.check.layouts import matrix


def gradients(tmp_path, ranks, micro_batch_size):
    config = next(layout for layout in matrix(4) if layout.name == "fsdp4-accumulation").resolved.config
    training = config.training.model_copy(update={"micro_batch_size": micro_batch_size})
    config = config.model_copy(update={"training": training})
    loss = reference.write_reference(config, ranks, tmp_path / "reference.npz")
    found = reference.read_reference(tmp_path / "reference.npz")
    return loss, {variant: np.concatenate([g.ravel() for g in named.values()]) for variant, named in found.items()}


def test_one_micro_batch_is_its_last_and_its_own_mean(tmp_path):
    _, found = gradients(tmp_path, 1, 8)
    assert np.linalg.norm(found["right"]) > 0.1
    assert np.array_equal(found["last_micro_batch"], found["right"])
    assert np.allclose(found["mean_of_means"], found["right"], rtol=1e-12, atol=0)


def test_unequal_micro_batches_tell_the_three_apart_and_the_split_changes_nothing_that_is_right(tmp_path):
    loss, whole = gradients(tmp_path, 1, 8)
    loss_of_split, split = gradients(tmp_path, 4, 1)
    assert loss_of_split == pytest.approx(loss, rel=1e-12)
    assert np.array_equal(split["right"], whole["right"])
    size = np.linalg.norm(split["right"])
    for wrong in ("last_micro_batch", "mean_of_means"):
        assert np.linalg.norm(split[wrong] - split["right"]) > 0.05 * size


def test_a_full_disk_names_the_folder_and_fails_the_layout_alone(monkeypatch, tmp_path):
    def full(*_: object) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reference, "write_reference", full)
    told = []
    context = SimpleNamespace(rank=0, world_size=1, progress=lambda *_: None, emit=told.append)
    config = matrix(1)[0].resolved.config.model_dump(mode="json")
    layouts = [{"config": config, "data_parallel": 1}] * 2
    reference.run(context, {"layouts": layouts, "device": "cpu", "folder": str(tmp_path)})
    assert [event["layout"] for event in told] == [0, 1]
    assert told[0]["error"] == f"cannot write to {tmp_path}: No space left on device; TMPDIR names another place for it"
