"""Parameters of the two kinds of attention."""

from __future__ import annotations

from hpcli.config.schema import ModelSection
from hpcli.models.description import INITIAL_DEVIATION, ParameterSpec, known

GROUPED_QUERY_SPLIT = {"query.weight": 0, "key.weight": 0, "value.weight": 0, "output.weight": 1}
LATENT_SPLIT = {"query.weight": 0, "query_up.weight": 0, "kv_up.weight": 0, "output.weight": 1}
"""What tensor parallelism cuts: heads. Matrices are stored (output, input). Latents are whole on every rank."""


def attention_parameters(model: ModelSection, output_deviation: float) -> dict[str, ParameterSpec]:
    """Names within the attention module to shapes and initial values."""
    if model.attention == "mla":
        return _latent(model, output_deviation)
    width, heads = known(model.hidden_size), known(model.num_heads)
    return grouped_query_parameters(width, heads, known(model.num_kv_heads), output_deviation)


def grouped_query_parameters(
    width: int, heads: int, kv_heads: int, output_deviation: float
) -> dict[str, ParameterSpec]:
    """Grouped-query attention; with as many key as query heads, plain multi-head attention."""
    kv_width = width // heads * kv_heads
    return {
        "query.weight": ParameterSpec((width, width), INITIAL_DEVIATION),
        "key.weight": ParameterSpec((kv_width, width), INITIAL_DEVIATION),
        "value.weight": ParameterSpec((kv_width, width), INITIAL_DEVIATION),
        "output.weight": ParameterSpec((width, width), output_deviation),
    }


def _latent(model: ModelSection, output_deviation: float) -> dict[str, ParameterSpec]:
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""
    width, heads = known(model.hidden_size), known(model.num_heads)
    kv_rank, rope = known(model.kv_lora_rank), known(model.qk_rope_head_dim)
    nope, value = known(model.qk_nope_head_dim), known(model.v_head_dim)
    query_width = heads * (nope + rope)
    parameters = {}
    if rank := known(model.q_lora_rank):
        parameters["query_down.weight"] = ParameterSpec((rank, width), INITIAL_DEVIATION)
        parameters["query_norm.weight"] = ParameterSpec((rank,), None)
        parameters["query_up.weight"] = ParameterSpec((query_width, rank), INITIAL_DEVIATION)
    else:
        parameters["query.weight"] = ParameterSpec((query_width, width), INITIAL_DEVIATION)
    return parameters | {
        "kv_down.weight": ParameterSpec((kv_rank + rope, width), INITIAL_DEVIATION),
        "kv_norm.weight": ParameterSpec((kv_rank,), None),
        "kv_up.weight": ParameterSpec((heads * (nope + value), kv_rank), INITIAL_DEVIATION),
        "output.weight": ParameterSpec((width, heads * value), output_deviation),
    }
