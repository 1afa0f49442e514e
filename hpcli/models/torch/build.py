"""Build a model on the host with its initial values, before anything is sharded."""

from __future__ import annotations

import torch
from torch import nn

from hpcli.config.schema import ModelSection
from hpcli.models.description import describe_model, frozen_names, initial_value
from hpcli.models.torch.decoder import Decoder


def build_model(model: ModelSection, seed: int) -> nn.Module:
    """The module with NumPy-drawn initial values, float32, and ``model.freeze`` applied."""
    with torch.device("meta"):  # draws nothing and allocates nothing
        module: nn.Module = Decoder(model)
    specs = describe_model(model)
    names = {name: parameter for name, parameter in module.named_parameters()}
    if names.keys() != specs.keys():
        raise AssertionError(f"the module and its description differ: {sorted(names.keys() ^ specs.keys())}")
    frozen, _ = frozen_names(list(specs), model.freeze)
    made = {
        id(names[name]): nn.Parameter(
            torch.from_numpy(initial_value(name, spec, seed)), requires_grad=name not in frozen
        )
        for name, spec in specs.items()
    }
    for owner in module.modules():  # by identity, so that tied parameters stay tied
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = made[id(parameter)]
    return module
