"""Image-text pairs: what is on the images, and that every rank draws the same."""

from __future__ import annotations

import numpy as np
import pytest

from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.data.images import ImageTextBatches, caption, draw
from hpcli.data.text import IGNORED, Batch, joined
from hpcli.models.presets import complete
from hpcli.models.vlm import image_tokens


def config(path: str | None = None, preset: str = "vlm-tiny", **training: int) -> Config:
    settings = {"seq_length": 16, "global_batch_size": 6} | training
    return Config.model_validate(
        {"model": {"preset": preset, **complete(preset, {})}, "training": settings, "data": {"path": path}}
    )


@pytest.fixture
def made() -> ImageTextBatches:
    batches = make_batches(config())
    assert isinstance(batches, ImageTextBatches)
    return batches


def test_a_character_stands_in_its_own_cell_whatever_is_beside_it():
    alone, between = draw("  x", 16, 64), draw("i x i", 16, 64)
    assert alone.shape == (16, 64) and alone.dtype == np.float32
    assert 0.5 < alone.max() <= 1.0 and alone.min() == 0.0
    assert np.array_equal(alone[:, 16:24], between[:, 16:24])  # cells are half as wide as the image is high
    columns = np.flatnonzero(alone.any(axis=0))
    assert columns[0] >= 16 and columns[-1] < 24
    assert abs((columns[0] + columns[-1]) / 2 - 19.5) <= 1


def test_every_printable_byte_looks_different_but_for_the_space():
    images = {draw(chr(code), 16, 16).tobytes() for code in range(32, 127)}
    assert len(images) == 95
    assert not draw(" \n\t\0", 16, 64).any()


def test_text_that_does_not_fit_is_cut_and_a_small_image_is_drawn_too():
    assert np.array_equal(draw("abcdefghij", 16, 64), draw("abcdefgh", 16, 64))
    assert draw("abc", 16, 12).shape == (16, 12)
    assert draw("abc", 16, 12)[:, 8:].any()  # the beginning of the second character
    for height, width in ((1, 1), (7, 33), (64, 8)):
        assert draw("W", height, width).shape == (height, width)


def test_a_drawn_image_may_be_written_into():
    draw("abc", 16, 64)[:] = 1.0
    assert not draw("   ", 16, 64).any()


def test_a_caption_is_the_text_and_survives_a_character_that_was_cut():
    assert caption(np.array([72, 105, 33])) == "Hi!"
    assert caption(np.frombuffer("ä€".encode(), np.uint8)[1:-1].astype(np.int64)) == "\N{REPLACEMENT CHARACTER}" * 2


def test_each_image_shows_the_beginning_of_its_own_sequence(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"one two three four five six seven")
    batch = make_batches(config(str(path), seq_length=8, global_batch_size=4)).share(1, 0, 1)
    assert batch.images is not None and batch.images.shape == (4, 16, 64)
    for tokens, image in zip(batch.inputs, batch.images, strict=True):
        assert np.array_equal(image, draw(bytes(tokens.tolist()).decode(), 16, 64))
    assert len({image.tobytes() for image in batch.images}) == 4


def test_labels_begin_with_as_many_ignored_positions_as_the_image_takes(made):
    batch, text = made.share(1, 0, 1), made.text.share(1, 0, 1)
    patches = image_tokens(config().model)
    assert patches == 16 // 8 * (64 // 8)
    assert batch.labels.shape == (6, 16 + 16)
    assert (batch.labels[:, :patches] == IGNORED).all()
    assert np.array_equal(batch.labels[:, patches:], text.labels)
    assert np.array_equal(batch.inputs, text.inputs)


@pytest.mark.parametrize("shares", [2, 3, 6])
def test_the_global_batch_is_the_same_for_any_number_of_shares(made, shares):
    for step in (1, 4):
        whole = made.share(step, 0, 1)
        parts = joined([made.share(step, index, shares) for index in range(shares)])
        for one, other in zip(whole, parts, strict=True):
            assert np.array_equal(one, other)


def test_the_same_seed_draws_the_same_and_valid_tokens_are_those_of_the_text(made):
    again = make_batches(config())
    assert np.array_equal(made.share(3, 1, 2).images, again.share(3, 1, 2).images)
    other = make_batches(config(seed=1)).share(3, 1, 2)
    assert not np.array_equal(made.share(3, 1, 2).images, other.images)
    for step in range(1, 5):
        assert made.valid_tokens(step) == (made.share(step, 0, 1).labels != IGNORED).sum()


def test_a_share_splits_with_its_images(made):
    share = made.share(1, 0, 1)
    parts = share.split(4)
    assert [part.images.shape[0] for part in parts if part.images is not None] == [4, 2]
    for one, other in zip(share, joined(parts), strict=True):
        assert np.array_equal(one, other)


def test_the_model_is_given_images_where_there_are_any(made):
    batch = made.share(1, 0, 1)
    tokens, images = batch.model_inputs()
    assert tokens is batch.inputs and images is batch.images
    text = make_batches(config(preset="decoder-tiny")).share(1, 0, 1)
    assert text.images is None and joined(text.split(4)).images is None
    assert [part is text.inputs for part in text.model_inputs()] == [True]
    assert isinstance(text, Batch)
