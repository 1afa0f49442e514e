"""Activations of whole stages and classes of ranks, from fake runs of one or two layers of a kind."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hpcli.config.schema import Config
from hpcli.models.description import describe_model, frozen_names
from hpcli.models.stages import StageLayers
from hpcli.plan.fake_run import MicroBatch, fake_ranks, run_stage
from hyper_parallel.core.mesh import ParallelMesh


class _Kinds(NamedTuple):
    """A stage by what it consists of."""

    dense: int
    with_experts: int
    first: bool
    last: bool


class FakeRuns:
    """Runs micro-batches of stages, each kind once."""

    def __init__(self) -> None:
        self._known: dict[str, MicroBatch] = {}

    def stage(self, config: Config, mesh: ParallelMesh, stage: StageLayers) -> MicroBatch:
        """One micro-batch of ``stage``. It is linear in the layers of a kind, which are alike."""
        if _freezes_layers(config):  # then they are not alike
            return self._run(config, stage, mesh)
        kinds = _kinds(config, stage)
        least = kinds._replace(dense=min(kinds.dense, 1), with_experts=min(kinds.with_experts, 1))
        base = self._run(*_shortened(config, least), mesh)
        saved, temporary, sent = base.saved, base.temporary, Counter(base.sent)
        for field in ("dense", "with_experts"):
            more = getattr(kinds, field) - getattr(least, field)
            if more:
                more_layers = least._replace(dense=2) if field == "dense" else least._replace(with_experts=2)
                longer = self._run(*_shortened(config, more_layers), mesh)
                saved += more * (longer.saved - base.saved)
                temporary = max(temporary, longer.temporary)
                for kind, count in longer.sent.items():
                    sent[kind] += more * (count - base.sent[kind])
        return MicroBatch(saved, temporary, sent)

    def _run(self, config: Config, stage: StageLayers, mesh: ParallelMesh) -> MicroBatch:
        ranks = ParallelMesh(pp=min(2, mesh.pp), dp_shard=mesh.ep, ep=mesh.ep, tp=mesh.tp)
        training = config.training
        key = repr(
            (
                config.model,
                stage,
                ranks,
                training.micro_batch_size,
                training.seq_length,
                training.compute_dtype,
                training.activation_checkpointing,
                config.parallelism.sequence_parallel,
            )
        )
        if key not in self._known:
            with fake_ranks(ranks):
                self._known[key] = run_stage(config, ranks, stage)
        return self._known[key]


def _freezes_layers(config: Config) -> bool:
    if not config.model.freeze:
        return False
    frozen, _ = frozen_names(list(describe_model(config.model)), config.model.freeze)
    return any(name.startswith("layers.") for name in frozen)


def _shortened(config: Config, kinds: _Kinds) -> tuple[Config, StageLayers]:
    """A model that has these layers alone, and the stage that holds them."""
    layers = kinds.dense + kinds.with_experts
    changes: dict[str, int] = {"num_layers": layers}
    if config.model.num_experts:
        changes["first_dense_layers"] = kinds.dense
    model = config.model.model_copy(update=changes)
    return config.model_copy(update={"model": model}), StageLayers(0, layers, kinds.first, kinds.last)


def _kinds(config: Config, stage: StageLayers) -> _Kinds:
    dense = stage.stop - stage.start
    if config.model.num_experts:
        dense = min(max((config.model.first_dense_layers or 0) - stage.start, 0), dense)
    return _Kinds(dense, stage.stop - stage.start - dense, stage.first, stage.last)
