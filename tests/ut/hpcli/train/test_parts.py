"""The parts of a training step that need no other rank."""

from __future__ import annotations

import math

import pytest
import torch

from hpcli.config.schema import Config, OptimizerSection
from hpcli.data.text import IGNORED
from hpcli.train.loop import _learning_rate
from hpcli.train.planted import KINDS, Planted, planted_failure
from hpcli.train.precision import precision_policy
from hpcli.train.torch_loss import token_loss
from hpcli.train.torch_optimizer import Optimizer
from hyper_parallel.core.precision import MixedPrecisionPolicy


def test_the_loss_is_a_sum_over_valid_tokens():
    logits = torch.zeros(1, 3, 256)
    labels = torch.tensor([[7, IGNORED, 9]])
    assert token_loss(logits, labels).item() == pytest.approx(2 * math.log(256), rel=1e-6)
    assert token_loss(logits, torch.full((1, 3), IGNORED)).item() == 0.0


def test_the_loss_is_taken_in_float32():
    logits = torch.randn(1, 5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.tensor([[1, 2, 3, 4, 5]])
    loss = token_loss(logits, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(token_loss(logits.double(), labels).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("warmup", "rates"), [(0, [1.0, 1.0, 1.0, 1.0]), (1, [1.0, 1.0, 1.0, 1.0]), (4, [0.25, 0.5, 0.75, 1.0])]
)
def test_the_learning_rate_rises_linearly_and_stays(warmup, rates):
    settings = OptimizerSection(lr=2.0, warmup_steps=warmup)
    assert [_learning_rate(settings, step) / 2.0 for step in (1, 2, 3, 4)] == rates
    assert _learning_rate(settings, 1000) == 2.0


@pytest.mark.parametrize(("in_fp32", "compute", "reduce"), [(True, "bfloat16", "float32"), (False, "bfloat16", "bfloat16")])
def test_accumulate_allreduce_grads_in_fp32_decides_the_reduce_dtype(in_fp32, compute, reduce):
    config = Config.model_validate(
        {"training": {"compute_dtype": compute, "accumulate_allreduce_grads_in_fp32": in_fp32}}
    )
    assert precision_policy(config).resolved_reduce_dtype == reduce
    assert precision_policy(config).reduce_dtype == ("float32" if in_fp32 else None)


def optimizer_of(settings: OptimizerSection, policy: MixedPrecisionPolicy | None = None) -> tuple[dict, Optimizer]:
    parameters = {
        "matrix": torch.nn.Parameter(torch.full((2, 2), 2.0)),
        "gain": torch.nn.Parameter(torch.full((2,), 2.0)),
        "frozen": torch.nn.Parameter(torch.full((2, 2), 2.0), requires_grad=False),
    }
    return parameters, Optimizer(parameters, settings, policy or MixedPrecisionPolicy())


def test_plain_sgd_by_hand_decays_matrices_only():
    parameters, optimizer = optimizer_of(OptimizerSection(name="sgd", lr=9.0, weight_decay=0.5))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step(0.1)
    assert parameters["matrix"].flatten().tolist() == [pytest.approx(2 - 0.1 * (1 + 0.5 * 2))] * 4
    assert parameters["gain"].tolist() == [pytest.approx(2 - 0.1 * 1)] * 2
    assert parameters["frozen"].flatten().tolist() == [2.0] * 4
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values())


def test_adamw_by_hand_decays_matrices_only():
    parameters, optimizer = optimizer_of(OptimizerSection(lr=9.0, weight_decay=0.5, eps=1e-12))
    for name in ("matrix", "gain"):
        parameters[name].grad = torch.full_like(parameters[name], 3.0)
    optimizer.step(0.1)  # the first step of Adam moves every element by the learning rate
    assert parameters["matrix"].flatten().tolist() == [pytest.approx(2 * (1 - 0.1 * 0.5) - 0.1, rel=1e-6)] * 4
    assert parameters["gain"].tolist() == [pytest.approx(1.9, rel=1e-6)] * 2


def test_updates_too_small_for_bfloat16_are_kept_in_the_master_weights():
    policy = MixedPrecisionPolicy("bfloat16", "float32")
    parameters, optimizer = optimizer_of(OptimizerSection(name="sgd", weight_decay=0.0), policy)
    seen = []
    for _ in range(20):
        parameters["gain"].grad = torch.ones(2)
        optimizer.step(2.0**-10)  # bfloat16 steps by 2^-7 just below 2
        seen.append(parameters["gain"][0].item())
    assert seen[:3] == [2.0, 2.0, 2.0]
    assert seen[-1] == 2.0 - 2 * 2.0**-7  # rounded to even from 2 - 20 / 1024 = 1.98046875
    assert all(value == torch.tensor(value).bfloat16().item() for value in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_failure_is_read_from_the_environment(kind):
    assert planted_failure({"HPCLI_PLANT": f"{kind}:rank=3,step=2"}) == Planted(kind, 3, 2)


def test_a_planted_failure_strikes_its_rank_and_step_alone():
    assert planted_failure({}) is None
    planted = Planted("raise", 3, 2)
    planted.strike(3, 1)
    planted.strike(2, 2)
    with pytest.raises(RuntimeError, match="planted failure"):
        planted.strike(3, 2)


@pytest.mark.parametrize("text", ["raise", "raise:rank=1", "vanish:rank=1,step=1", "raise:rank=-1,step=1", "kill:rank=1,step=1 "])
def test_a_planted_failure_that_is_not_understood_is_refused(text):
    with pytest.raises(ValueError, match="KIND:rank=R,step=S"):
        planted_failure({"HPCLI_PLANT": text})
