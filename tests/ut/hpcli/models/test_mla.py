"""Multi-head latent attention, against the formulas of the paper written out head by head in NumPy, float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hpcli.config.schema import Config, ModelSection
from hpcli.models.attention import attention_parameters
from hpcli.models.description import describe_model
from hpcli.models.parallel import parallel_plan
from hpcli.models.presets import complete
from hpcli.models.torch.attention import GroupedQueryAttention, LatentAttention, make_attention
from hpcli.models.torch.build import build_model

SIZES = {
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 3,
    "ffn_size": 8,
    "q_lora_rank": 7,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}


def section(preset: str = "mla-tiny", **changed: Any) -> ModelSection:
    return ModelSection.model_validate({"preset": preset, **complete(preset, SIZES | changed)})


def attention(model: ModelSection, seed: int = 0) -> LatentAttention:
    module = make_attention(model)
    assert isinstance(module, LatentAttention)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():  # larger than the initial values, so that attention is far from uniform
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module


def by_hand(module: LatentAttention, model: ModelSection, x_TD: np.ndarray) -> np.ndarray:
    """DeepSeek-AI, "DeepSeek-V2", 2024, equations 37 to 47, for one sequence."""
    weight = {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}
    heads, nope, rope, value = model.num_heads, model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    assert heads and nope and rope and value and model.kv_lora_rank and model.rope_theta and model.norm_eps

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps) * weight[name]

    def turned(vector: np.ndarray, position: int) -> np.ndarray:
        result = np.empty_like(vector)
        half = rope // 2
        for i in range(half):
            angle = position * model.rope_theta ** (-2 * i / rope)
            a, b = vector[i], vector[half + i]
            result[i] = a * math.cos(angle) - b * math.sin(angle)
            result[half + i] = b * math.cos(angle) + a * math.sin(angle)
        return result

    if model.q_lora_rank:
        queries = norm(x_TD @ weight["query_down.weight"].T, "query_norm.weight") @ weight["query_up.weight"].T
    else:
        queries = x_TD @ weight["query.weight"].T
    down = x_TD @ weight["kv_down.weight"].T
    up = norm(down[:, : model.kv_lora_rank], "kv_norm.weight") @ weight["kv_up.weight"].T
    shared_key = down[:, model.kv_lora_rank :]
    rows = []
    for t in range(len(x_TD)):
        of_heads = []
        for head in range(heads):
            query = queries[t, head * (nope + rope) : (head + 1) * (nope + rope)]
            mine = up[:, head * (nope + value) : (head + 1) * (nope + value)]
            scores = [
                (query[:nope] @ mine[s, :nope] + turned(query[nope:], t) @ turned(shared_key[s], s))
                / math.sqrt(nope + rope)
                for s in range(t + 1)
            ]
            weights = np.exp(np.array(scores) - max(scores))
            of_heads.append(weights / weights.sum() @ mine[: t + 1, nope:])
        rows.append(np.concatenate(of_heads) @ weight["output.weight"].T)
    return np.stack(rows)


@pytest.mark.parametrize(
    "changed",
    [{}, {"q_lora_rank": 0}, {"qk_rope_head_dim": 6}, {"v_head_dim": 9}, {"num_heads": 1}, {"rope_theta": 100.0}],
    ids=str,
)
def test_it_is_the_attention_of_the_paper(changed):
    model = section(**changed)
    module = attention(model).double()
    x_BTD = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with torch.no_grad():
        y_BTD = module(x_BTD).numpy()
    expected = np.stack([by_hand(module, model, x_TD) for x_TD in x_BTD.numpy()])
    np.testing.assert_allclose(y_BTD, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())  # angles are float32


def test_names_and_shapes():
    assert {name: spec.shape for name, spec in attention_parameters(section(), 0.02).items()} == {
        "query_down.weight": (7, 12),
        "query_norm.weight": (7,),
        "query_up.weight": (3 * (4 + 2), 7),
        "kv_down.weight": (5 + 2, 12),
        "kv_norm.weight": (5,),
        "kv_up.weight": (3 * (4 + 3), 5),
        "output.weight": (12, 3 * 3),
    }


def test_rank_0_takes_queries_from_the_hidden_state_directly():
    specs = attention_parameters(section(q_lora_rank=0), 0.02)
    assert specs["query.weight"].shape == (3 * (4 + 2), 12)
    assert not any(name.startswith("query_") for name in specs)


def test_every_layer_of_the_model_has_it():
    model = section()
    assert [type(layer.attention) for layer in build_model(model, 0).layers.values()] == [LatentAttention] * 2
    assert sum("kv_down" in name for name in describe_model(model)) == 2


@pytest.mark.parametrize("preset", ["moe-tiny", "vlm-tiny", "decoder-small"])
def test_the_kind_of_attention_is_a_choice_of_its_own(preset):
    assert isinstance(make_attention(ModelSection(preset=preset, **complete(preset, {"attention": "mla"}))), LatentAttention)
    assert isinstance(make_attention(ModelSection(preset=preset, **complete(preset, {}))), GroupedQueryAttention)


def test_tensor_parallelism_cuts_heads_and_leaves_latents_whole():
    config = Config(model=section())
    plan = parallel_plan(config)
    dims = {name: plan.tensor_dim(f"layers.1.attention.{name}") for name in attention_parameters(config.model, 0.02)}
    assert dims == {
        "query_down.weight": None,
        "query_norm.weight": None,
        "query_up.weight": 0,
        "kv_down.weight": None,
        "kv_norm.weight": None,
        "kv_up.weight": 0,
        "output.weight": 1,
    }
    assert all(plan.in_region(f"layers.1.attention.{name}") for name in dims)


def test_bfloat16_activations_stay_bfloat16():
    module = attention(section()).bfloat16()
    assert module(torch.zeros(1, 4, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16
