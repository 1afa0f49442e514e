"""A decoder-only transformer: attention of either kind, dense or with experts, rotary positions, RMSNorm, SwiGLU."""

from __future__ import annotations

from hpcli.config.schema import ModelSection
from hpcli.models.attention import attention_parameters
from hpcli.models.description import INITIAL_DEVIATION, ParameterSpec, known
from hpcli.models.feed_forward import dense_parameters, has_experts, moe_parameters


def decoder_parameters(model: ModelSection) -> dict[str, ParameterSpec]:
    """Parameter name to shape and initial value. Matrices are stored (output, input).

    The projections that write into the residual stream start smaller by sqrt(2 * layers), as in GPT-2, so that the stream's
    variance does not grow with depth.
    """
    width, vocabulary = known(model.hidden_size), known(model.vocab_size)
    parameters = {"embedding.weight": ParameterSpec((vocabulary, width), INITIAL_DEVIATION)}
    for index in range(known(model.num_layers)):
        parameters |= {f"layers.{index}.{name}": spec for name, spec in _layer(model, index).items()}
    parameters["norm.weight"] = ParameterSpec((width,), None)
    if not model.tie_embeddings:
        parameters["head.weight"] = ParameterSpec((vocabulary, width), INITIAL_DEVIATION)
    return parameters


def _layer(model: ModelSection, index: int) -> dict[str, ParameterSpec]:
    width = known(model.hidden_size)
    residual = INITIAL_DEVIATION / (2 * known(model.num_layers)) ** 0.5
    parts = {"attention": attention_parameters(model, residual)}
    if has_experts(model, index):
        parts["moe"] = moe_parameters(model, residual)
    else:
        parts["ffn"] = dense_parameters(width, known(model.ffn_size), residual)
    parameters = {}
    for norm, (part, specs) in zip(("attention_norm", "ffn_norm"), parts.items(), strict=True):
        parameters[f"{norm}.weight"] = ParameterSpec((width,), None)
        parameters |= {f"{part}.{name}": spec for name, spec in specs.items()}
    return parameters
