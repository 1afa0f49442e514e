"""Checkpoints on disk: complete or not there, found by many names, pruned, checked before they are used."""

from __future__ import annotations

import json

import pytest

from hpcli.checkpoint import folder
from hpcli.checkpoint.errors import CheckpointError


def write(directory, step, content=b"tensors"):
    made = folder.begin(directory, step)
    (made / "shard.safetensors").write_bytes(content)
    return folder.publish(made, {"step": step})


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_appears_only_when_it_is_published(tmp_path):
    made = folder.begin(tmp_path, 20)
    (made / "shard.safetensors").write_bytes(b"half")
    assert folder.complete(tmp_path) == []
    folder.publish(made, {"step": 20})
    assert names(tmp_path) == ["step-00000020"]
    assert folder.read_state(tmp_path / "step-00000020") == {"format": 1, "step": 20, "files": {"shard.safetensors": 4}}


def test_the_leftovers_of_a_killed_run_are_not_checkpoints_and_are_cleared(tmp_path):
    write(tmp_path, 10)
    (folder.begin(tmp_path, 20) / "shard.safetensors").write_bytes(b"half")
    (tmp_path / ".deleting-step-00000005").mkdir()
    assert folder.find(tmp_path).name == "step-00000010"
    assert list(folder.begin(tmp_path, 20).iterdir()) == []  # what was half written is gone
    folder.prune(tmp_path, keep=3)
    assert names(tmp_path) == ["step-00000010"]


def test_the_newest_are_kept_by_number_not_by_name(tmp_path):
    for step in (9, 10, 123456789, 99999999):
        write(tmp_path, step)
    folder.prune(tmp_path, keep=2)
    assert [path.name for path in folder.complete(tmp_path)] == ["step-99999999", "step-123456789"]


def test_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 10, b"old")
    write(tmp_path, 10, b"newer")
    assert (tmp_path / "step-00000010" / "shard.safetensors").read_bytes() == b"newer"
    assert names(tmp_path) == ["step-00000010"]


def test_a_run_a_directory_and_a_checkpoint_all_mean_the_newest(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    write(checkpoints, 1)
    last = write(checkpoints, 2)
    assert folder.find(tmp_path / "run") == folder.find(checkpoints) == folder.find(last) == last


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: (c / "shard.safetensors").unlink(), "shard.safetensors is missing"),
        (lambda c: (c / "shard.safetensors").write_bytes(b"ten"), "has 3 bytes, and 7 were written"),
        (lambda c: (c / "state.json").write_text("{"), "damaged"),
        (lambda c: (c / "state.json").write_text("[]"), "damaged"),
        (lambda c: (c / "state.json").write_text(json.dumps({"format": 9, "files": {}})), "format 9"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, spoil, message):
    checkpoint = write(tmp_path, 7)
    spoil(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        folder.read_state(checkpoint)


def test_nothing_to_resume_from_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="there is no"):
        folder.find(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        folder.find(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        folder.find(tmp_path / "file")


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint into .*taken"):
        folder.begin(tmp_path / "taken", 1)
