"""The decoder as a torch module; its parameters are those of :mod:`hpcli.models.decoder`.

Suffixes give shapes: B batch, T tokens, V vocabulary, D hidden size, H query heads, K key and value heads, E head size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from hpcli.config.schema import ModelSection


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 whatever the dtype of x (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        wide = x_BTD.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x_BTD.dtype) * self.weight


@lru_cache(maxsize=8)
def rotary_table(tokens: int, head_size: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, each (tokens, head_size / 2), float32 (Su et al., 2021)."""
    frequency = theta ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angle = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x_BHTE: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn each pair (first half, second half) of the head dimension by its position's angle."""
    cos, sin = table
    a, b = x_BHTE.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head (Ainslie et al., 2023)."""

    def __init__(self, width: int, heads: int, kv_heads: int, theta: float) -> None:
        super().__init__()
        self.head_size = width // heads
        self.theta = theta
        self.query = _linear(width, width)
        self.key = _linear(width, kv_heads * self.head_size)
        self.value = _linear(width, kv_heads * self.head_size)
        self.output = _linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        table = rotary_table(x_BTD.shape[1], self.head_size, self.theta, x_BTD.device)
        q_BHTE = rotate(self._heads(self.query(x_BTD)), table)
        k_BKTE = rotate(self._heads(self.key(x_BTD)), table)
        v_BKTE = self._heads(self.value(x_BTD))
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)
        return self.output(y_BHTE.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = _linear(width, inner)
        self.up = _linear(width, inner)
        self.down = _linear(inner, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.hidden_size and model.num_heads and model.num_kv_heads and model.ffn_size
        assert model.norm_eps is not None and model.rope_theta is not None
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = Attention(model.hidden_size, model.num_heads, model.num_kv_heads, model.rope_theta)
        self.ffn_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.ffn = FeedForward(model.hidden_size, model.ffn_size)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Decoder(nn.Module):
    """Token ids (B, T), int64, to logits (B, T, V) in the compute dtype."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.vocab_size and model.hidden_size and model.num_layers and model.norm_eps is not None
        self.embedding = _Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.head = _linear(model.hidden_size, model.vocab_size)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: build_model gives every value, and drawing them on the meta device takes torch a millisecond a matrix."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing, as for _Linear."""


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return _Linear(inputs, outputs, bias=False)
