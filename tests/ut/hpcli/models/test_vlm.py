"""The vision-language model: what its parts see, and that it learns to read its images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.data.text import IGNORED, Batch
from hpcli.models.description import describe_model
from hpcli.models.presets import complete
from hpcli.models.stages import StageLayers
from hpcli.models.torch.build import build_model
from hpcli.models.vlm import image_tokens
from hpcli.train.torch_loss import token_loss

SIZES = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 64,
    "image_height": 16,
    "image_width": 32,
    "patch_size": 8,
    "vision_hidden_size": 24,
    "vision_layers": 1,
    "vision_heads": 2,
    "vision_ffn_size": 40,
}
PATCHES = 8


def config(path: Path | None = None, **changed: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"preset": "vlm-tiny", **complete("vlm-tiny", SIZES | changed)},
            "training": {"seq_length": 8, "global_batch_size": 32, "seed": 0},
            "data": {"path": path and str(path)},
        }
    )


def build(**changed: Any) -> torch.nn.Module:
    return build_model(config(**changed).model, 0)


def loss(model: torch.nn.Module, batch: Batch, images: np.ndarray | None = None) -> torch.Tensor:
    """Per byte."""
    shown = batch.images if images is None else images
    logits = model(torch.from_numpy(batch.inputs), torch.from_numpy(shown))
    return token_loss(logits, torch.from_numpy(batch.labels)) / int((batch.labels != IGNORED).sum())


def test_shapes_follow_from_the_sizes():
    specs = {name: spec.shape for name, spec in describe_model(config().model).items()}
    assert specs["vision.patch.weight"] == (24, 64)  # a patch has 8 x 8 pixels
    assert specs["vision.position"] == (PATCHES, 24)  # 2 rows of 4
    assert specs["vision.layers.0.attention.key.weight"] == (24, 24)
    assert specs["vision.layers.0.ffn.down.weight"] == (24, 40)
    assert specs["projector.up.weight"] == (32, 24)
    assert specs["projector.down.weight"] == (32, 32)
    assert next(name for name in specs if not name.startswith(("vision.", "projector."))) == "embedding.weight"
    assert len([name for name in specs if name.startswith("vision.")]) == 9 + 3


@pytest.mark.parametrize("changed", [{}, {"num_experts": 4}, {"attention": "mla"}, {"num_experts": 4, "attention": "mla"}], ids=str)
def test_the_text_tower_is_any_decoder(changed):
    parameters = {name: tuple(p.shape) for name, p in build(**changed).named_parameters()}
    specs = describe_model(config(**changed).model)
    assert parameters == {name: spec.shape for name, spec in specs.items()}
    assert ("layers.1.moe.experts.up" in specs) == ("num_experts" in changed)
    assert ("layers.1.attention.kv_down.weight" in specs) == ("attention" in changed)
    batch = make_batches(config(**changed)).share(1, 0, 1)
    assert float(loss(build(**changed), batch).detach()) == pytest.approx(math.log(256), abs=0.1)


def test_images_take_the_first_positions_and_tokens_the_others():
    model = build()
    logits = model(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 16, 32))
    assert logits.shape == (3, PATCHES + 5, 256)
    assert image_tokens(config().model) == PATCHES
    assert image_tokens(Config().model) == 0  # a decoder


def test_patches_are_the_squares_of_the_image_row_by_row():
    model = build()
    images = torch.zeros(1, 16, 32)
    images[0, 8:16, 24:32] = torch.arange(64.0).view(8, 8)  # the last of 2 rows of 4
    seen: list[torch.Tensor] = []
    model.vision.patch.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    model.vision(images)
    assert seen[0].shape == (1, PATCHES, 64)
    assert torch.equal(seen[0][0, 7], torch.arange(64.0))
    assert not seen[0][0, :7].any()


def test_every_patch_sees_every_other_and_knows_its_place():
    vision = build().vision
    image = torch.rand(1, 16, 32, generator=torch.Generator().manual_seed(0))
    changed = image.clone()
    changed[0, 8:, 24:] = 0.0  # the last patch
    with torch.no_grad():
        difference = (vision(image) - vision(changed))[0].abs().amax(-1)
        flat = vision(torch.zeros(1, 16, 32))[0]
    assert (difference > 0).all()
    assert len({row.numpy().tobytes() for row in flat}) == PATCHES


def test_text_sees_the_whole_image_and_the_image_no_text():
    model = build()
    tokens = torch.tensor([[1, 2, 3]])
    image = torch.rand(1, 16, 32, generator=torch.Generator().manual_seed(0))
    dark_corner = image.clone()
    dark_corner[0, 8:, 24:] = 0.0
    with torch.no_grad():
        logits, other_image = model(tokens, image), model(tokens, dark_corner)
        other_text = model(torch.tensor([[9, 2, 3]]), image)
    assert (logits[0, PATCHES] != other_image[0, PATCHES]).any()  # the first token
    assert torch.equal(logits[0, :PATCHES], other_text[0, :PATCHES])
    assert (logits[0, PATCHES:] != other_text[0, PATCHES:]).any(-1).all()


def test_all_parameters_get_a_gradient_but_the_frozen():
    batch = make_batches(config()).share(1, 0, 1)
    for model, frozen in ((build(), ""), (build(freeze=["vision.*"]), "vision.")):
        loss(model, batch).backward()
        for name, parameter in model.named_parameters():
            if frozen and name.startswith(frozen):
                assert parameter.grad is None, name
            else:
                assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_vision_and_projector_are_on_the_first_stage_alone():
    model = config().model
    first, last = (build_model(model, 0, StageLayers(i, i + 1, i == 0, i == 1)) for i in (0, 1))
    names = [name for name, _ in first.named_parameters()] + [name for name, _ in last.named_parameters()]
    assert sorted(names) == sorted(describe_model(model))
    assert not any(name.startswith(("vision.", "projector.", "embedding.")) for name, _ in last.named_parameters())
    whole = build_model(model, 0)
    tokens, images = torch.tensor([[1, 2, 3]]), torch.rand(1, 16, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(last(first(tokens, images)), whole(tokens, images))


def test_exchanging_the_images_of_a_batch_changes_its_loss():
    batch = make_batches(config()).share(1, 0, 1)
    model = build()
    with torch.no_grad():
        right = float(loss(model, batch))
        assert float(loss(model, batch)) == right
        assert float(loss(model, batch, np.roll(batch.images, 1, axis=0))) != right


WORDS = ("apricot", "balcony", "cabinet", "diamond", "elastic", "factory", "gravity", "harvest")


def test_a_trained_model_reads_its_images(tmp_path):
    """Each sequence is one of eight words. Who does not see it must guess it, at ln 8 = 2.08 nats or 0.26 for each of 8 bytes."""
    chosen = np.random.default_rng(0).choice(WORDS, 4000)
    path = tmp_path / "words.txt"
    path.write_text(" " + " ".join(chosen))
    settings = config(path, vision_hidden_size=32, vision_ffn_size=64)
    batches = make_batches(settings)
    assert bytes(batches.share(1, 0, 1).inputs[0].tolist()).decode()[1:] in WORDS
    model = build_model(settings.model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(1, 181):
        loss(model, batches.share(step, 0, 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    later = batches.share(1000, 0, 1)
    with torch.no_grad():
        right = float(loss(model, later))
        exchanged = float(loss(model, later, np.roll(later.images, 1, axis=0)))
    assert right < 0.1  # 0.008 for each of the seeds 0, 1 and 2
    assert exchanged > math.log(8) / 8  # 0.9 to 1.4
