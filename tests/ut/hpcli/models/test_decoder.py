"""A model's description and its module: the same parameters, the same bits for every layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpcli.config.schema import ModelSection
from hpcli.models.decoder import decoder_parameters
from hpcli.models.description import ParameterSpec, describe_model, frozen_names, initial_value
from hpcli.models.presets import PRESETS
from hpcli.models.torch.build import build_model

TINY = {"vocab_size": 256, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24}


def section(preset: str = "decoder-tiny", **changed) -> ModelSection:
    return ModelSection.model_validate({"preset": preset, **PRESETS[preset], **changed})


@pytest.mark.parametrize(
    "model",
    [
        *(section(preset) for preset in PRESETS),
        section(**TINY),
        section(**TINY, tie_embeddings=True),
        section(**(TINY | {"num_kv_heads": 1, "num_layers": 1})),
        section(**(TINY | {"num_kv_heads": 4, "ffn_size": 7})),
    ],
    ids=str,
)
def test_the_description_is_that_of_the_module(model):
    parameters = {name: tuple(p.shape) for name, p in build_model(model, 0).named_parameters()}
    assert parameters == {name: spec.shape for name, spec in describe_model(model).items()}


def test_the_presets_have_the_sizes_that_they_say():
    count = {preset: sum(math.prod(s.shape) for s in describe_model(section(preset)).values()) for preset in PRESETS}
    assert 190_000 < count["decoder-tiny"] < 250_000
    assert 1_000_000 < count["decoder-small"] < 1_100_000


def test_shapes_follow_from_the_sizes():
    specs = describe_model(section(**TINY))
    assert specs["layers.1.attention.query.weight"].shape == (16, 16)
    assert specs["layers.1.attention.key.weight"].shape == (8, 16)  # 2 heads of 4
    assert specs["layers.1.ffn.gate.weight"].shape == (24, 16)
    assert specs["layers.1.ffn.down.weight"].shape == (16, 24)
    assert specs["head.weight"].shape == specs["embedding.weight"].shape == (256, 16)
    assert len(specs) == 2 * 9 + 3


def test_a_tied_model_has_one_embedding_and_one_parameter_less():
    model = build_model(section(**TINY, tie_embeddings=True), 0)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in describe_model(section(**TINY, tie_embeddings=True))


def test_initial_values_depend_on_seed_and_name_alone():
    spec = ParameterSpec((4, 6), 0.02)
    first = initial_value("layers.0.x", spec, 7)
    assert first.dtype == np.float32
    assert np.array_equal(first, initial_value("layers.0.x", spec, 7))
    assert not np.array_equal(first, initial_value("layers.1.x", spec, 7))
    assert not np.array_equal(first, initial_value("layers.0.x", spec, 8))
    # a model of more layers starts with the same first layer, but for the scale that depends on the depth
    two, three = (build_model(section(**(TINY | {"num_layers": n})), 7) for n in (2, 3))
    name = "layers.0.attention.query.weight"
    assert torch.equal(two.get_parameter(name), three.get_parameter(name))
    name = "layers.0.ffn.down.weight"
    scaled = two.get_parameter(name) * (2 / 3) ** 0.5
    torch.testing.assert_close(three.get_parameter(name).data, scaled.data, rtol=1e-6, atol=0)


def test_initial_values_do_not_depend_on_the_state_of_torchs_or_numpys_generators():
    first = build_model(section(**TINY), 3).state_dict()
    torch.manual_seed(99)
    np.random.seed(99)
    torch.rand(5)
    second = build_model(section(**TINY), 3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_initial_values_have_the_spread_that_is_described():
    values = initial_value("x", ParameterSpec((400, 500), 0.02), 0)
    assert values.mean() == pytest.approx(0.0, abs=2e-4)
    assert values.std() == pytest.approx(0.02, rel=0.01)
    assert (initial_value("x", ParameterSpec((3,), None), 0) == 1.0).all()
    specs = decoder_parameters(section(**TINY))
    assert specs["layers.0.ffn.down.weight"].standard_deviation == pytest.approx(0.02 / 4**0.5)
    assert specs["layers.0.ffn.up.weight"].standard_deviation == 0.02


def test_frozen_parameters_are_matched_by_name_and_idle_patterns_told():
    names = ["embedding.weight", "layers.0.a", "layers.10.a", "norm.weight"]
    assert frozen_names(names, []) == (set(), [])
    assert frozen_names(names, ["layers.0.*", "norm.*"]) == ({"layers.0.a", "norm.weight"}, [])
    assert frozen_names(names, ["layers.1.*", "*.weight"]) == ({"embedding.weight", "norm.weight"}, ["layers.1.*"])
    model = build_model(section(**TINY, freeze=["layers.1.*"]), 0)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 9
    assert all(name.startswith("layers.1.") for name in frozen)


def test_a_token_sees_the_tokens_before_it_and_none_after():
    model = build_model(section(**TINY), 0)
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 200
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (1, 8, 256)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5], after[0, 5])
    assert not torch.equal(before[0, 7], after[0, 7])


def test_a_token_sees_its_position():
    model = build_model(section(**(TINY | {"num_layers": 1})), 0)
    for name in ("query", "key"):  # far from the start, where attention is nearly uniform
        model.layers["0"].attention.get_submodule(name).weight.data *= 50
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4]]))
        swapped = model(torch.tensor([[2, 1, 3, 4]]))
    # without positions one layer's last token would see the same set of tokens
    assert (logits[0, 3] - swapped[0, 3]).abs().max() > 1e-4


def test_unresolved_sizes_are_refused():
    with pytest.raises(ValueError, match="resolve_config"):
        describe_model(ModelSection())
