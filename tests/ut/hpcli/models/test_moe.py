"""Routed experts in one process, against the formula written out token by token in NumPy, float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcli.config.schema import Config, ModelSection
from hpcli.models.attention import GROUPED_QUERY_SPLIT
from hpcli.models.description import INITIAL_DEVIATION, describe_model, initial_value
from hpcli.models.feed_forward import moe_parameters
from hpcli.models.parallel import parallel_plan
from hpcli.models.presets import complete
from hpcli.models.torch.build import build_model
from hpcli.models.torch.moe import Experts, MixtureOfExperts
from hyper_parallel.platform.torch.expert_parallel import ExpertDispatch

SIZES = {
    "hidden_size": 6,
    "num_layers": 3,
    "num_heads": 1,
    "num_kv_heads": 1,
    "ffn_size": 7,
    "num_experts": 5,
    "experts_per_token": 2,
    "expert_ffn_size": 4,
    "num_shared_experts": 1,
    "first_dense_layers": 1,
}


def section(**changed: Any) -> ModelSection:
    return ModelSection.model_validate({"preset": "moe-tiny", **complete("moe-tiny", SIZES | changed)})


def layer(model: ModelSection, seed: int = 0) -> MixtureOfExperts:
    module = MixtureOfExperts(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():  # larger than the initial values, so that the scores are far from uniform
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module


def by_hand(module: MixtureOfExperts, each: int, x_ND: np.ndarray) -> np.ndarray:
    weight = {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}

    def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        inner = gate @ x
        return down @ (inner / (1 + np.exp(-inner)) * (up @ x))

    rows = []
    for x in x_ND:
        scores = np.exp(weight["router.weight"] @ x)
        chosen = sorted(range(len(scores)), key=lambda expert: -scores[expert])[:each]
        total = sum(scores[expert] for expert in chosen) if each > 1 else sum(scores)
        row = sum(
            scores[e] / total * swiglu(x, *(weight[f"experts.{part}"][e] for part in ("gate", "up", "down")))
            for e in chosen
        )
        if module.shared is not None:
            row = row + swiglu(x, *(weight[f"shared.{part}.weight"] for part in ("gate", "up", "down")))
        rows.append(row)
    return np.stack(rows)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_shared_experts": 0},
        {"num_shared_experts": 3},
        {"experts_per_token": 1},
        {"experts_per_token": 5},
        {"num_experts": 64, "experts_per_token": 8},
    ],
    ids=str,
)
def test_each_token_gets_the_scaled_sum_of_its_best_experts_and_the_shared_one(changed):
    model = section(**changed)
    module = layer(model).double()
    x_BTD = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with torch.no_grad():
        y_BTD = module(x_BTD)
    expected = by_hand(module, model.experts_per_token or 0, x_BTD.flatten(0, 1).numpy())
    # scores are float32
    np.testing.assert_allclose(y_BTD.flatten(0, 1).numpy(), expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("each", [1, 2, 4])
def test_the_router_learns_however_many_experts_a_token_has(each):
    module = layer(section(experts_per_token=each, num_shared_experts=0))
    module(torch.ones(1, 1, 6)).sum().backward()
    assert module.router.weight.grad.norm() > 1e-3  # scaled to add up to 1, one score alone would have a gradient of 0


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    module = layer(section(num_experts=4, experts_per_token=1, num_shared_experts=0))
    module.router.weight.data = torch.tensor([[2.0], [1.0], [0.0], [-1.0]]).expand(4, 6).clone()
    module(torch.ones(1, 3, 6)).sum().backward()  # every token's best is expert 0
    assert module.experts.dispatch.counts == [3, 0, 0, 0]
    for parameter in module.experts.parameters():
        assert parameter.grad is not None
        assert [bool(gradient.any()) for gradient in parameter.grad] == [True, False, False, False]


def test_no_token_is_dropped_however_many_want_one_expert():
    module = layer(section(num_experts=4, experts_per_token=2, num_shared_experts=0))
    module.router.weight.data = torch.tensor([[0.0], [2.0], [1.0], [-1.0]]).expand(4, 6).clone()
    y_BTD = module(torch.ones(8, 16, 6))
    assert module.experts.dispatch.counts == [0, 128, 128, 0]
    assert torch.equal(y_BTD, y_BTD[:1, :1].expand_as(y_BTD))
    assert y_BTD.any()


def test_gradients_are_the_derivatives():
    module = layer(section()).double()
    experts, expert_NK = module.experts, torch.tensor([[0, 3], [3, 1], [0, 1]])  # chosen: a step may not change them
    names = ("gate", "up", "down")

    def output(x_ND: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        held = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(experts, held, (x_ND, expert_NK))

    x_ND = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weights = [getattr(experts, name).detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(output, (x_ND, *weights))


def test_names_and_shapes():
    specs = moe_parameters(section(num_shared_experts=2), 0.01)
    assert {name: spec.shape for name, spec in specs.items()} == {
        "router.weight": (5, 6),
        "experts.gate": (5, 4, 6),
        "experts.up": (5, 4, 6),
        "experts.down": (5, 6, 4),
        "shared.gate.weight": (2 * 4, 6),
        "shared.up.weight": (2 * 4, 6),
        "shared.down.weight": (6, 2 * 4),
    }
    assert {name for name, spec in specs.items() if spec.standard_deviation == 0.01} == {"experts.down", "shared.down.weight"}
    assert not any("shared" in name for name in moe_parameters(section(num_shared_experts=0), 0.01))


@pytest.mark.parametrize(("dense", "kinds"), [(0, ["moe"] * 3), (1, ["ffn", "moe", "moe"]), (2, ["ffn", "ffn", "moe"])])
def test_the_first_layers_may_be_dense(dense, kinds):
    model = section(first_dense_layers=dense)
    assert [layer.feed_forward_name for layer in build_model(model, 0).layers.values()] == kinds
    described = {name.split(".")[2] for name in describe_model(model) if name.startswith("layers.0.")}
    assert described == {"attention_norm", "attention", "ffn_norm", kinds[0]}


def test_a_layers_experts_are_one_draw():
    model = section()
    gate = build_model(model, 7).get_parameter("layers.2.moe.experts.gate").detach().numpy()
    name = "layers.2.moe.experts.gate"
    np.testing.assert_array_equal(gate, initial_value(name, describe_model(model)[name], 7))
    assert len({expert.tobytes() for expert in gate}) == 5  # not five copies of one
    wide = initial_value(name, describe_model(section(num_experts=512))[name], 7)
    assert wide.std() == pytest.approx(INITIAL_DEVIATION, rel=0.02)


def test_the_plan_cuts_experts_along_three_dimensions_and_their_inner_width_as_a_dense_layer_does():
    plan = parallel_plan(Config(model=section()))
    assert plan.experts == ("layers.*.moe.experts",)
    tensor = {name: plan.tensor_dim(f"layers.1.moe.{name}") for name in moe_parameters(section(), 0.01)}
    assert tensor == {
        "router.weight": None,
        "experts.gate": 1,
        "experts.up": 1,
        "experts.down": 2,
        "shared.gate.weight": 0,
        "shared.up.weight": 0,
        "shared.down.weight": 1,
    }
    assert {name.rsplit(".", 1)[1]: dim for name, dim in plan.expert_shard_dims.items()} == {"gate": 2, "up": 2, "down": 1}
    assert all(plan.in_region(f"layers.1.moe.{name}") for name in tensor)
    assert not plan.is_expert("layers.0.ffn.gate.weight")
    assert all(plan.tensor_dim(f"layers.1.attention.{name}") is not None for name in GROUPED_QUERY_SPLIT)


def test_a_dense_model_has_no_experts_in_its_plan():
    dense = ModelSection.model_validate({"preset": "decoder-tiny", **complete("decoder-tiny", {})})
    assert parallel_plan(Config(model=dense)).experts == ()


def test_bfloat16_activations_stay_bfloat16_and_scores_are_float32():
    module = layer(section()).bfloat16()
    x_BTD = torch.ones(1, 4, 6, dtype=torch.bfloat16)
    assert module(x_BTD).dtype == torch.bfloat16
    assert module.router(x_BTD.flatten(0, 1)).dtype == torch.float32


def test_rows_come_back_in_the_order_in_which_they_went():
    dispatch = ExpertDispatch(4)
    seen: list[tuple[list[float], list[int]]] = []

    def times(rows_MD: torch.Tensor, counts: list[int]) -> torch.Tensor:
        seen.append((rows_MD.flatten().tolist(), counts))
        factor = torch.tensor([1.0, 10.0, 100.0, 1000.0]).repeat_interleave(torch.tensor(counts))
        return rows_MD * factor.unsqueeze(1)

    rows_MD = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    out_MD = dispatch(rows_MD, torch.tensor([3, 0, 3, 1, 0]), times)
    assert seen == [([2.0, 5.0, 4.0, 1.0, 3.0], [2, 1, 0, 2])]  # by expert, and within one as they came
    assert out_MD.flatten().tolist() == [1000.0, 2.0, 3000.0, 40.0, 5.0]
    assert dispatch(rows_MD[:0], torch.zeros(0, dtype=torch.int64), times).shape == (0, 1)
    assert dispatch.counts == [0, 0, 0, 0]


class Operations(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.names.append(function._opname)
        return function(*arguments, **(options or {}))


def test_the_host_waits_for_the_device_once(monkeypatch):
    waits = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (waits.append(tuple(tensor.shape)), tolist(tensor))[1])
    experts = Experts(5, 6, 4)
    with Operations() as seen, torch.no_grad():
        experts(torch.ones(3, 6), torch.tensor([[0, 1], [2, 3], [4, 0]]))
    assert waits == [(5,)]
    # what has a size or a value that depends on data, and so waits too
    assert not {"bincount", "repeat_interleave", "nonzero", "_local_scalar_dense", "unique"} & set(seen.names)
