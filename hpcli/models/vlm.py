"""What a vision-language model has before its decoder: a vision transformer (Dosovitskiy et al., 2021) and a projector."""

from __future__ import annotations

from hpcli.config.schema import ModelSection
from hpcli.models.attention import grouped_query_parameters
from hpcli.models.description import INITIAL_DEVIATION, ParameterSpec, known
from hpcli.models.feed_forward import dense_parameters


def image_tokens(model: ModelSection) -> int:
    """How many positions of the decoder's sequence an image takes; 0 for a model without images."""
    if model.kind != "vlm":
        return 0
    patch = known(model.patch_size)
    return known(model.image_height) // patch * (known(model.image_width) // patch)


def vision_parameters(model: ModelSection) -> dict[str, ParameterSpec]:
    """The vision encoder and the projector to the decoder's width."""
    width, layers, patch = known(model.vision_hidden_size), known(model.vision_layers), known(model.patch_size)
    heads, inner, text_width = known(model.vision_heads), known(model.vision_ffn_size), known(model.hidden_size)
    residual = INITIAL_DEVIATION / (2 * layers) ** 0.5
    parameters = {
        "vision.position": ParameterSpec((image_tokens(model), width), INITIAL_DEVIATION),
        "vision.patch.weight": ParameterSpec((width, patch * patch), INITIAL_DEVIATION),
    }
    for index in range(layers):
        attention = grouped_query_parameters(width, heads, heads, residual)
        dense = dense_parameters(width, inner, residual)
        layer = {"attention_norm.weight": ParameterSpec((width,), None)}
        layer |= {f"attention.{name}": spec for name, spec in attention.items()}
        layer |= {"ffn_norm.weight": ParameterSpec((width,), None)}
        layer |= {f"ffn.{name}": spec for name, spec in dense.items()}
        parameters |= {f"vision.layers.{index}.{name}": spec for name, spec in layer.items()}
    parameters["vision.norm.weight"] = ParameterSpec((width,), None)
    parameters["projector.up.weight"] = ParameterSpec((text_width, width), INITIAL_DEVIATION)
    parameters["projector.down.weight"] = ParameterSpec((text_width, text_width), INITIAL_DEVIATION)
    return parameters
