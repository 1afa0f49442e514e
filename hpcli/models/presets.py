"""Named model sizes. Every value can be overridden in the configuration's ``model`` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Sizes = dict[str, "int | float | bool | str"]

_COMMON: Sizes = {
    "vocab_size": 256,  # bytes
    "rope_theta": 10_000.0,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "attention": "gqa",
    "num_experts": 0,
}
# about 0.2 million parameters: tests and measurements of everything that is not arithmetic
_TINY: Sizes = _COMMON | {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 192}
# about 1.05 million parameters: learns English bytes on a laptop's CPU within a minute
_SMALL: Sizes = _COMMON | {"hidden_size": 128, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 512}

_LATENT_TINY: Sizes = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LATENT_SMALL: Sizes = _LATENT_TINY | {"q_lora_rank": 64, "kv_lora_rank": 32}
_EXPERTS_TINY: Sizes = {
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_size": 48,
    "num_shared_experts": 1,
    "first_dense_layers": 1,
}
_EXPERTS_SMALL: Sizes = _EXPERTS_TINY | {"expert_ffn_size": 128}
_VISION_TINY: Sizes = {
    "image_height": 16,
    "image_width": 64,
    "patch_size": 8,
    "vision_hidden_size": 32,
    "vision_layers": 2,
    "vision_heads": 2,
    "vision_ffn_size": 96,
}
_VISION_SMALL: Sizes = _VISION_TINY | {"vision_hidden_size": 64, "vision_heads": 4, "vision_ffn_size": 192}


def _without(sizes: Sizes, *keys: str) -> Sizes:
    return {key: value for key, value in sizes.items() if key not in keys}


PRESETS: dict[str, Sizes] = {
    "decoder-tiny": _TINY,
    "decoder-small": _SMALL,
    "mla-tiny": _without(_TINY, "num_kv_heads") | {"attention": "mla"} | _LATENT_TINY,
    "mla-small": _without(_SMALL, "num_kv_heads") | {"attention": "mla"} | _LATENT_SMALL,
    "moe-tiny": _TINY | _EXPERTS_TINY,
    "moe-small": _SMALL | _EXPERTS_SMALL,
    "vlm-tiny": _TINY | _VISION_TINY,
    "vlm-small": _SMALL | _VISION_SMALL,
}

LATENT_KEYS = tuple(_LATENT_TINY)
EXPERT_KEYS = tuple(key for key in _EXPERTS_TINY if key != "num_experts")
VISION_KEYS = tuple(_VISION_TINY)


def complete(preset: str, chosen: Mapping[str, Any]) -> Sizes:
    """Every size of a model: what was ``chosen`` (None: not), else the preset's.

    Where a choice brings a part that the preset lacks (latent attention, experts), the part's sizes are those of the preset of the
    same suffix that has it.
    """
    given = {key: value for key, value in chosen.items() if value is not None}
    sizes = PRESETS[preset] | given
    small = preset.endswith("-small")
    if sizes["attention"] == "mla":
        sizes = (_LATENT_SMALL if small else _LATENT_TINY) | sizes
    if sizes["num_experts"]:
        sizes = (_EXPERTS_SMALL if small else _EXPERTS_TINY) | sizes
    if sizes["attention"] == "gqa" and "num_kv_heads" not in sizes:
        sizes["num_kv_heads"] = sizes["num_heads"]
    return sizes


def without_effect(preset: str, chosen: Mapping[str, Any]) -> dict[str, str]:
    """The chosen keys that the model does not read, and why."""
    sizes = complete(preset, chosen)
    given = {key for key, value in chosen.items() if value is not None}
    reasons: dict[str, str] = {}
    if sizes["attention"] != "mla":
        reasons |= dict.fromkeys(LATENT_KEYS, "it belongs to attention: mla")
    else:
        reasons["num_kv_heads"] = "it belongs to attention: gqa; mla gives every head its own key and value"
    if not sizes["num_experts"]:
        reasons |= dict.fromkeys(EXPERT_KEYS, "it belongs to models with num_experts above 0")
    if not preset.startswith("vlm"):
        reasons |= dict.fromkeys(VISION_KEYS, "it belongs to the vlm presets")
    return {key: reason for key, reason in reasons.items() if key in given}
