"""A plan that does not fit its model is refused, in words that name what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.mesh import LayoutError, ParallelMesh
from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.core.plan_check import check_plan

PARAMETERS = [
    "embedding.weight",
    "layers.0.norm.weight",
    "layers.0.ffn.up.weight",
    "layers.0.ffn.up.bias",
    "layers.0.ffn.down.weight",
    "layers.0.moe.experts.up",
    "head.weight",
]
MODULES = ["", "embedding", "layers", "layers.0", "layers.0.norm", "layers.0.ffn", "layers.0.ffn.up", "layers.0.ffn.down"]
MODULES += ["layers.0.moe", "layers.0.moe.experts", "head"]
PLAN = ParallelPlan(
    layers=("layers.0",),
    tensor_split={
        "embedding.weight": 0,
        "head.weight": 0,
        "*.ffn.up.*": 0,
        "*.ffn.down.weight": 1,
        "*.experts.up": 1,
    },
    regions=("layers.*.ffn", "layers.*.moe"),
    embedding="embedding",
    head="head",
    experts=("layers.*.moe.experts",),
    sequence_parallel=True,
)
TP2 = ParallelMesh(tp=2)


def told(plan: ParallelPlan, mesh: ParallelMesh = TP2, parameters: list[str] = PARAMETERS) -> str:
    with pytest.raises(LayoutError) as raised:
        check_plan(plan, mesh, MODULES, parameters)
    return str(raised.value)


def split(**changed: int | None) -> dict[str, int]:
    """The plan's tensor_split with some patterns changed or left out; ``_`` stands for a dot, ``any`` for a star."""
    names = {name.replace("any", "*").replace("_", "."): dim for name, dim in changed.items()}
    return {name: dim for name, dim in (PLAN.tensor_split | names).items() if dim is not None}


def test_a_plan_that_fits_is_taken():
    check_plan(PLAN, TP2, MODULES, PARAMETERS)
    check_plan(replace(PLAN, sequence_parallel=False, embedding=None, tensor_split=split(embedding_weight=None)), TP2, MODULES, PARAMETERS)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (replace(PLAN, layers=("layers.0", "layers.7")), "layers: the model has no module 'layers.7'"),
        (replace(PLAN, tensor_split=split(any_fnn_up_any=0)), "tensor_split: the model has no parameter '*.fnn.up.*'"),
        (replace(PLAN, regions=(*PLAN.regions, "projector")), "regions: the model has no module 'projector'"),
        (replace(PLAN, head="lm_head", tensor_split=split(head_weight=None)), "head: the model has no module 'lm_head'"),
        (replace(PLAN, sequence_entrances=("enter",)), "sequence_entrances: the model has no module 'enter'"),
        (replace(PLAN, regions=("layers.*.moe",)), "layers.0.ffn.up.weight is cut, and lies in no region"),
        (
            replace(PLAN, tensor_split=split(any_ffn_up_any=None, any_ffn_down_weight=None)),
            "tensor_split cuts no parameter in layers.0.ffn: every rank would compute all of it",
        ),
        (replace(PLAN, regions=(*PLAN.regions, "layers.0")), "layers.0.ffn lies in another region, layers.0"),
        (
            replace(PLAN, embedding=None, tensor_split=split(embedding_weight=None)),
            "sequence_parallel: nothing splits the sequence",
        ),
        (
            replace(PLAN, tensor_split={"*.up.weight": 0} | split(any_ffn_up_any=None)),
            "layers.0.ffn.up.weight is cut along dimension 0, so layers.0.ffn.up.bias must be too",
        ),
        (replace(PLAN, tensor_split=split(head_weight=None)), "head: its rows are the vocabulary"),
        (replace(PLAN, tensor_split=split(embedding_weight=1)), "embedding: its rows are the vocabulary"),
    ],
)
def test_what_does_not_fit_is_named(plan, expected):
    assert expected in told(plan)


def test_a_bias_that_every_rank_would_add_is_refused():
    parameters = [*PARAMETERS, "layers.0.ffn.down.bias"]
    assert "layers.0.ffn.down.bias would be added once on each tensor-parallel rank" in told(PLAN, parameters=parameters)


def test_without_tensor_parallelism_only_names_count():
    check_plan(replace(PLAN, regions=()), ParallelMesh(dp_shard=2), MODULES, PARAMETERS)
    assert "no module 'layers.7'" in told(replace(PLAN, layers=("layers.7",)), ParallelMesh(dp_shard=2))


def test_a_pipeline_stage_need_not_have_all_that_is_named():
    stage = replace(PLAN, layers=("layers.0", "layers.7"), regions=(*PLAN.regions, "projector"))
    check_plan(stage, ParallelMesh(pp=2, tp=2), MODULES, PARAMETERS)
    misspelt = replace(stage, regions=("layers.*.fnn", "layers.*.moe"))
    assert "layers.0.ffn.up.weight is cut, and lies in no region" in told(misspelt, ParallelMesh(pp=2, tp=2))
