"""Named model sizes. Every value can be overridden in the configuration's ``model`` section."""

from __future__ import annotations

DECODER_DEFAULTS: dict[str, int | float | bool] = {
    "vocab_size": 256,  # bytes
    "rope_theta": 10_000.0,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
}

PRESETS: dict[str, dict[str, int | float | bool]] = {
    # about 0.2 million parameters: tests and measurements of everything that is not arithmetic
    "decoder-tiny": DECODER_DEFAULTS
    | {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 192},
    # about 1.05 million parameters: learns English bytes on a laptop's CPU within a minute
    "decoder-small": DECODER_DEFAULTS
    | {"hidden_size": 128, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 512},
}
