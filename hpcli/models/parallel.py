"""How each model is parallelised: its layers, what tensor parallelism cuts, where its experts are."""

from __future__ import annotations

from fnmatch import filter as matching_names

from hpcli.config.schema import Config
from hpcli.models.attention import GROUPED_QUERY_SPLIT, LATENT_SPLIT
from hpcli.models.description import describe_model, known
from hpcli.models.feed_forward import DENSE_SPLIT, EXPERTS_SHARD_DIMS, EXPERTS_SPLIT
from hyper_parallel.core.plan import ParallelPlan

_LAYER_SPLIT = {
    **{f"attention.{name}": dim for name, dim in (GROUPED_QUERY_SPLIT | LATENT_SPLIT).items()},
    **{f"ffn.{name}": dim for name, dim in DENSE_SPLIT.items()},
    **{f"moe.{name}": dim for name, dim in EXPERTS_SPLIT.items()},
    **{f"moe.shared.{name}": dim for name, dim in DENSE_SPLIT.items()},
}
TENSOR_SPLIT = {
    "embedding.weight": 0,  # the vocabulary
    "head.weight": 0,
    **{f"layers.*.{name}": dim for name, dim in _LAYER_SPLIT.items()},
    **{f"vision.layers.*.{name}": dim for name, dim in _LAYER_SPLIT.items()},
    "projector.up.weight": 0,
    "projector.down.weight": 1,
}
REGIONS = (
    "layers.*.attention",
    "layers.*.ffn",
    "layers.*.moe",
    "vision.layers.*.attention",
    "vision.layers.*.ffn",
    "projector",
)


def parallel_plan(config: Config) -> ParallelPlan:
    """The plan for the model of ``config``, whose sizes are resolved."""
    model = config.model
    images = model.kind == "vlm"
    parameters = [*describe_model(model), "head.weight"]  # tied to the embedding or not
    modules = {name[:end] for name in parameters for end, letter in enumerate(name) if letter == "."}
    vision = [f"vision.layers.{index}" for index in range(known(model.vision_layers) if images else 0)]
    return ParallelPlan(
        layers=(*vision, *(f"layers.{index}" for index in range(known(model.num_layers)))),
        unit=config.fsdp_config.unit,
        activation_checkpointing=config.training.activation_checkpointing == "full",
        reshard_after_forward=config.fsdp_config.reshard_after_forward,
        tensor_split={pattern: dim for pattern, dim in TENSOR_SPLIT.items() if matching_names(parameters, pattern)},
        regions=tuple(pattern for pattern in REGIONS if matching_names(modules, pattern)),
        embedding="embedding",
        head="head",
        experts=("layers.*.moe.experts",) if model.num_experts else (),
        expert_shard_dims=(
            {f"layers.*.moe.{name}": dim for name, dim in EXPERTS_SHARD_DIMS.items()} if model.num_experts else {}
        ),
        sequence_parallel=config.parallelism.sequence_parallel,
        sequence_entrances=("enter",) if images else (),
        whole_sequence=("vision", "projector", "embedding") if images else (),
    )
