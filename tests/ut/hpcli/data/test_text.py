"""Batches of text: the same global batch for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpcli.data.documents import DataError, load_documents
from hpcli.data.text import IGNORED, Batch, TextBatches

DOCUMENTS = [b"abcdefgh", b"xyz", b"q", b"", b"0123456789"]
# predicted bytes in sequences of 3: "abcdefgh" has 7 (3, 3, 1), "xyz" 2, "q" and "" none, the digits 9 (3, 3, 3)
VALID = [3, 3, 1, 2, 3, 3, 3]


def batches(batch_size: int = 4, *, seed: int = 0, shuffle: bool = True, documents=DOCUMENTS) -> TextBatches:
    return TextBatches(documents, seq_length=3, batch_size=batch_size, seed=seed, shuffle=shuffle)


def joined(made: TextBatches, step: int, shares: int) -> Batch:
    parts = [made.share(step, index, shares) for index in range(shares)]
    return Batch(np.concatenate([p.inputs for p in parts]), np.concatenate([p.labels for p in parts]))


def test_each_byte_but_a_documents_first_is_predicted_once_from_those_before_it():
    batch = batches(7, shuffle=False).share(1, 0, 1)
    assert [bytes(row.tolist()) for row in batch.inputs] == [
        b"abc",
        b"def",
        b"gh\0",
        b"xyz",
        b"012",
        b"345",
        b"678",
    ]
    labels = [[chr(n) if n != IGNORED else "" for n in row] for row in batch.labels]
    assert labels == [list("bcd"), list("efg"), ["h", "", ""], ["y", "z", ""], list("123"), list("456"), list("789")]
    assert batch.inputs.dtype == batch.labels.dtype == np.int64


def test_the_end_of_a_document_is_padded_with_ignored_labels():
    made = batches(7, shuffle=False)
    assert (made.share(1, 0, 1).labels != IGNORED).sum(axis=1).tolist() == VALID
    assert IGNORED == -100


def test_a_document_that_fills_its_last_sequence_needs_no_padding():
    made = batches(2, shuffle=False, documents=[b"0123456"])
    assert made.share(1, 0, 1).labels.tolist() == [[49, 50, 51], [52, 53, 54]]


@pytest.mark.parametrize("shares", [2, 3, 4, 6, 12])
def test_the_global_batch_is_the_same_for_any_number_of_shares(shares):
    made = batches(12)
    for step in (1, 2, 5):
        whole, parts = joined(made, step, 1), joined(made, step, shares)
        assert np.array_equal(whole.inputs, parts.inputs)
        assert np.array_equal(whole.labels, parts.labels)


def test_valid_tokens_are_those_of_the_whole_global_batch():
    made = batches(4)
    for step in range(1, 20):
        assert made.valid_tokens(step) == (made.share(step, 0, 1).labels != IGNORED).sum()
    assert batches(7).valid_tokens(1) == sum(VALID)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_visits_every_sequence_once(batch_size, shuffle):
    made = batches(batch_size, shuffle=shuffle)
    visited = [tuple(row) for step in range(1, 22) for row in made.share(step, 0, 1).inputs.tolist()]
    everything = sorted(map(tuple, made.bytes[:, :-1].tolist()))
    for start in range(0, len(visited) - 6, 7):
        assert sorted(visited[start : start + 7]) == everything


def test_epochs_and_seeds_differ_in_their_order_and_a_seed_repeats_itself():
    def order(seed: int, step: int) -> list[list[int]]:
        return batches(7, seed=seed).share(step, 0, 1).inputs.tolist()

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)
    assert batches(7, shuffle=False).share(2, 0, 1).inputs.tolist() == batches(7, shuffle=False).share(1, 0, 1).inputs.tolist()


def test_a_batch_larger_than_the_text_repeats_it():
    made = batches(15)
    assert len(made.share(1, 0, 1).inputs) == 15
    assert made.valid_tokens(1) >= 2 * sum(VALID)


def test_a_share_splits_into_micro_batches_in_order():
    share = batches(6).share(1, 0, 1)
    parts = share.split(4)
    assert [len(part.inputs) for part in parts] == [4, 2]
    assert np.array_equal(np.concatenate([part.labels for part in parts]), share.labels)


def test_the_built_in_text_is_english_prose_of_a_useful_size():
    documents = load_documents(None)
    assert documents == load_documents(None)
    assert sum(map(len, documents)) > 300_000
    assert b"the" in documents[0]
    made = TextBatches(documents, seq_length=128, batch_size=24, seed=0, shuffle=True)
    assert 1 < (made.valid < 128).sum() < len(made.valid)  # ends of documents: ranks differ in their valid tokens


def test_a_file_is_one_document_of_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("ä€\r\n".encode())
    assert load_documents(str(path)) == ["ä€\r\n".encode()]


@pytest.mark.parametrize("content", [b"", b"x"])
def test_a_file_without_two_bytes_is_refused(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"has {len(content)} bytes; at least 2"):
        load_documents(str(path))


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path):
    with pytest.raises(DataError, match="cannot read .*: No such file"):
        load_documents(str(tmp_path / "none"))
    with pytest.raises(DataError, match="cannot read .*: Is a directory"):
        load_documents(str(tmp_path))
    with pytest.raises(DataError, match="no two consecutive bytes"):
        batches(documents=[b"", b"a"])
