"""Whether a plan fits a model: what a misspelt name or a forgotten border would make of it is a wrong gradient, not an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from hyper_parallel.core.mesh import LayoutError, LayoutProblem, ParallelMesh
from hyper_parallel.core.plan import ParallelPlan


def check_plan(plan: ParallelPlan, mesh: ParallelMesh, modules: Collection[str], parameters: Collection[str]) -> None:
    """Refuse a plan that does not fit a model, or one stage of it, with these names of ``modules`` and ``parameters``.

    A stage of a pipeline need not have all that a plan names; a whole model must.

    Raises:
        LayoutError: with every problem found.
    """
    problems = list(_named_in_vain(plan, modules, parameters)) if mesh.pp == 1 else []
    if mesh.tp > 1:
        problems += _outside_regions(plan, parameters)
        problems += _regions_that_cut_nothing(plan, modules, parameters)
        problems += _biases(plan, parameters)
        problems += _vocabulary(plan, parameters)
        if plan.sequence_parallel and plan.embedding is None and not plan.sequence_entrances:
            problems.append(
                LayoutProblem(
                    "sequence_parallel",
                    True,
                    "nothing splits the sequence: name the vocabulary-parallel embedding, or the modules in sequence_entrances",
                )
            )
    if problems:
        raise LayoutError(problems)


def _named_in_vain(plan: ParallelPlan, modules: Iterable[str], parameters: Iterable[str]) -> Iterator[LayoutProblem]:
    named = {
        "layers": plan.layers,
        "regions": plan.regions,
        "embedding": (plan.embedding,) if plan.embedding is not None else (),
        "head": (plan.head,) if plan.head is not None else (),
        "experts": plan.experts,
        "sequence_entrances": plan.sequence_entrances,
        "whole_sequence": plan.whole_sequence,
    }
    for field, patterns in named.items():
        yield from _unmatched(field, patterns, modules, "module")
    yield from _unmatched("tensor_split", plan.tensor_split, parameters, "parameter")
    yield from _unmatched("expert_shard_dims", plan.expert_shard_dims, parameters, "parameter")


def _unmatched(field: str, patterns: Iterable[str], names: Iterable[str], kind: str) -> Iterator[LayoutProblem]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield LayoutProblem(field, pattern, f"the model has no {kind} {pattern!r}")


def _outside_regions(plan: ParallelPlan, parameters: Iterable[str]) -> Iterator[LayoutProblem]:
    for name in parameters:
        own = plan.embedding is not None and name.startswith(f"{plan.embedding}.")
        if plan.tensor_dim(name) is not None and not (plan.in_region(name) or own or plan.is_expert(name)):
            yield LayoutProblem(
                "tensor_split",
                name,
                f"{name} is cut, and lies in no region: nothing would gather its input or add up its output. "
                "Name the module around it in regions",
            )


def _regions_that_cut_nothing(
    plan: ParallelPlan, modules: Iterable[str], parameters: Collection[str]
) -> Iterator[LayoutProblem]:
    regions = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in plan.regions)]
    for region in regions:
        inside = [name for name in parameters if name.startswith(f"{region}.")]
        if not any(plan.tensor_dim(name) is not None for name in inside):
            yield LayoutProblem(
                "regions",
                region,
                f"tensor_split cuts no parameter in {region}: every rank would compute all of it, and the sum over "
                "tensor-parallel ranks be a multiple of it",
            )
        outer = [other for other in regions if region.startswith(f"{other}.")]
        if outer:
            yield LayoutProblem("regions", region, f"{region} lies in another region, {outer[0]}; leave one of them out")


def _biases(plan: ParallelPlan, parameters: Collection[str]) -> Iterator[LayoutProblem]:
    for name in parameters:
        weight = name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or weight not in parameters or plan.is_expert(name):
            continue
        dim = plan.tensor_dim(weight)
        if dim == 1 and plan.in_region(name) and plan.tensor_dim(name) is None:
            yield LayoutProblem(
                "tensor_split",
                name,
                f"{name} would be added once on each tensor-parallel rank, since the rows of {weight} are cut and the ranks' "
                "outputs are added up; build the layer with bias=False, or add the bias outside the region",
            )
        if dim == 0 and plan.tensor_dim(name) is None:
            yield LayoutProblem("tensor_split", name, f"{weight} is cut along dimension 0, so {name} must be too")


def _vocabulary(plan: ParallelPlan, parameters: Collection[str]) -> Iterator[LayoutProblem]:
    for field, module in (("embedding", plan.embedding), ("head", plan.head)):
        if module is not None and f"{module}.weight" in parameters and plan.tensor_dim(f"{module}.weight") != 0:
            yield LayoutProblem(
                field, module, f"its rows are the vocabulary: tensor_split must cut {module}.weight along dimension 0"
            )
