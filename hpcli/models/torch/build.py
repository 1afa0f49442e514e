"""Build a model, or one pipeline stage of it, on the host with its initial values, before anything is sharded."""

from __future__ import annotations

import torch
from torch import nn

from hpcli.config.schema import ModelSection
from hpcli.models.description import describe_model, frozen_names, initial_value
from hpcli.models.stages import StageLayers, whole_model
from hpcli.models.torch.decoder import Decoder
from hpcli.models.torch.vlm import VisionLanguageModel


def build_model(model: ModelSection, seed: int, stage: StageLayers | None = None) -> nn.Module:
    """The module with NumPy-drawn initial values, float32, and ``model.freeze`` applied.

    Args:
        stage: the part to build; None for the whole. Only its own parameters are drawn, named as in the whole model. Where
            embeddings are tied across stages, the last stage has a ``head.weight`` with the values of ``embedding.weight``.
    """
    kind = VisionLanguageModel if model.kind == "vlm" else Decoder
    with torch.device("meta"):  # draws nothing and allocates nothing
        module: nn.Module = kind(model, stage or whole_model(model))
    specs = describe_model(model)
    frozen, _ = frozen_names(list(specs), model.freeze)
    made = {}
    for name, parameter in module.named_parameters():
        source = name if name in specs else "embedding.weight"
        if specs[source].shape != tuple(parameter.shape):
            raise AssertionError(f"{name} is {tuple(parameter.shape)}, and described as {specs[source].shape}")
        values = torch.from_numpy(initial_value(source, specs[source], seed))
        made[id(parameter)] = nn.Parameter(values, requires_grad=source not in frozen)
    for owner in module.modules():  # by identity, so that tied parameters stay tied
        for name, held in owner._parameters.items():
            if held is not None:
                owner._parameters[name] = made[id(held)]
    return module
