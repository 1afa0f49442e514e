"""A decoder-only transformer: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""

from __future__ import annotations

from hpcli.config.schema import ModelSection
from hpcli.models.description import ParameterSpec

INITIAL_DEVIATION = 0.02


def decoder_parameters(model: ModelSection) -> dict[str, ParameterSpec]:
    """Parameter name to shape and initial value. Matrices are stored (output, input).

    The two projections that write into the residual stream start smaller by sqrt(2 * layers), as in GPT-2, so that the
    stream's variance does not grow with depth.
    """
    width, layers = _known(model.hidden_size), _known(model.num_layers)
    head_size = width // _known(model.num_heads)
    kv_width, ffn, vocab = head_size * _known(model.num_kv_heads), _known(model.ffn_size), _known(model.vocab_size)
    residual = INITIAL_DEVIATION / (2 * layers) ** 0.5
    parameters = {"embedding.weight": ParameterSpec((vocab, width), INITIAL_DEVIATION)}
    for index in range(layers):
        layer = {
            "attention_norm.weight": ParameterSpec((width,), None),
            "attention.query.weight": ParameterSpec((width, width), INITIAL_DEVIATION),
            "attention.key.weight": ParameterSpec((kv_width, width), INITIAL_DEVIATION),
            "attention.value.weight": ParameterSpec((kv_width, width), INITIAL_DEVIATION),
            "attention.output.weight": ParameterSpec((width, width), residual),
            "ffn_norm.weight": ParameterSpec((width,), None),
            "ffn.gate.weight": ParameterSpec((ffn, width), INITIAL_DEVIATION),
            "ffn.up.weight": ParameterSpec((ffn, width), INITIAL_DEVIATION),
            "ffn.down.weight": ParameterSpec((width, ffn), residual),
        }
        parameters |= {f"layers.{index}.{name}": spec for name, spec in layer.items()}
    parameters["norm.weight"] = ParameterSpec((width,), None)
    if not model.tie_embeddings:
        parameters["head.weight"] = ParameterSpec((vocab, width), INITIAL_DEVIATION)
    return parameters


def _known(size: int | None) -> int:
    if size is None:
        raise ValueError("the model's sizes are not resolved yet; resolve_config fills them from the preset")
    return size
