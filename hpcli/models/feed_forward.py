"""Parameters of a layer's feed-forward part: one dense network, or routed experts and shared ones."""

from __future__ import annotations

from hpcli.config.schema import ModelSection
from hpcli.models.description import INITIAL_DEVIATION, ParameterSpec, known

DENSE_SPLIT = {"gate.weight": 0, "up.weight": 0, "down.weight": 1}
EXPERTS_SPLIT = {"experts.gate": 1, "experts.up": 1, "experts.down": 2}
"""What tensor parallelism cuts: the inner width, of experts too."""
EXPERTS_SHARD_DIMS = {"experts.gate": 2, "experts.up": 2, "experts.down": 1}
"""What FSDP cuts of the stacked experts: the hidden size, which neither expert nor tensor parallelism cuts."""


def has_experts(model: ModelSection, layer: int) -> bool:
    """Whether ``layer`` (from 0) has routed experts instead of a dense network."""
    return bool(model.num_experts) and layer >= (model.first_dense_layers or 0)


def dense_parameters(width: int, inner: int, output_deviation: float) -> dict[str, ParameterSpec]:
    """down(silu(gate(x)) * up(x))."""
    return {
        "gate.weight": ParameterSpec((inner, width), INITIAL_DEVIATION),
        "up.weight": ParameterSpec((inner, width), INITIAL_DEVIATION),
        "down.weight": ParameterSpec((width, inner), output_deviation),
    }


def moe_parameters(model: ModelSection, output_deviation: float) -> dict[str, ParameterSpec]:
    """The router, the experts stacked along dimension 0, and the shared experts as one dense network of their joint width."""
    width, experts = known(model.hidden_size), known(model.num_experts)
    inner, shared = known(model.expert_ffn_size), known(model.num_shared_experts)
    parameters = {
        "router.weight": ParameterSpec((experts, width), INITIAL_DEVIATION),
        "experts.gate": ParameterSpec((experts, inner, width), INITIAL_DEVIATION),
        "experts.up": ParameterSpec((experts, inner, width), INITIAL_DEVIATION),
        "experts.down": ParameterSpec((experts, width, inner), output_deviation),
    }
    if shared:
        dense = dense_parameters(width, shared * inner, output_deviation)
        parameters |= {f"shared.{name}": spec for name, spec in dense.items()}
    return parameters
