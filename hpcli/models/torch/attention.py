"""The two kinds of attention. Both run on the heads they are given, so tensor parallelism needs no other code.

Suffixes give shapes: B batch, T tokens, D hidden size, H query heads, K key and value heads, E head size, R latent width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hpcli.config.schema import ModelSection
from hpcli.models.torch.layers import Linear, RMSNorm, rotary_table, rotate


class GroupedQueryAttention(nn.Module):
    """Self-attention in which groups of query heads share one key and value head (Ainslie et al., 2023).

    Args:
        theta: base of the rotary positions; None for none.
        causal: each position sees those before it only.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, theta: float | None, *, causal: bool = True) -> None:
        super().__init__()
        self.head_size = width // heads
        self.theta = theta
        self.causal = causal
        self.query = Linear(width, width)
        self.key = Linear(width, kv_heads * self.head_size)
        self.value = Linear(width, kv_heads * self.head_size)
        self.output = Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q_BHTE, k_BKTE = self._heads(self.query(x_BTD)), self._heads(self.key(x_BTD))
        if self.theta is not None:
            table = rotary_table(x_BTD.shape[1], self.head_size, self.theta, x_BTD.device)
            q_BHTE, k_BKTE = rotate(q_BHTE, table), rotate(k_BKTE, table)
        v_BKTE = self._heads(self.value(x_BTD))
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=self.causal, enable_gqa=True)
        return self.output(y_BHTE.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values come from one narrow latent (DeepSeek-AI, "DeepSeek-V2", 2024, 2.1).

    A query and a key have a part without position, of their own for every head, and a rotary part; the keys' rotary part is one
    for all heads.
    """

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.hidden_size and model.num_heads and model.kv_lora_rank and model.v_head_dim
        assert model.qk_nope_head_dim and model.qk_rope_head_dim and model.norm_eps and model.rope_theta
        width, heads = model.hidden_size, model.num_heads
        self.nope, self.rope = model.qk_nope_head_dim, model.qk_rope_head_dim
        self.value_size, self.kv_rank = model.v_head_dim, model.kv_lora_rank
        self.theta = model.rope_theta
        query_width = heads * (self.nope + self.rope)
        if model.q_lora_rank:
            self.query_down = Linear(width, model.q_lora_rank)
            self.query_norm = RMSNorm(model.q_lora_rank, model.norm_eps)
            self.query_up = Linear(model.q_lora_rank, query_width)
        else:
            self.query = Linear(width, query_width)
        self.direct = not model.q_lora_rank
        self.kv_down = Linear(width, self.kv_rank + self.rope)
        self.kv_norm = RMSNorm(self.kv_rank, model.norm_eps)
        self.kv_up = Linear(self.kv_rank, heads * (self.nope + self.value_size))
        self.output = Linear(heads * self.value_size, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        table = rotary_table(x_BTD.shape[1], self.rope, self.theta, x_BTD.device)
        q_BTD = self.query(x_BTD) if self.direct else self.query_up(self.query_norm(self.query_down(x_BTD)))
        q_BHTE = q_BTD.unflatten(-1, (-1, self.nope + self.rope)).transpose(1, 2)
        q_nope, q_rope = q_BHTE.split([self.nope, self.rope], dim=-1)
        latent_BTR, k_rope_BTE = self.kv_down(x_BTD).split([self.kv_rank, self.rope], dim=-1)
        k_rope = rotate(k_rope_BTE.unsqueeze(1), table)
        kv_BHTE = self.kv_up(self.kv_norm(latent_BTR)).unflatten(-1, (-1, self.nope + self.value_size)).transpose(1, 2)
        k_nope, v_BHTE = kv_BHTE.split([self.nope, self.value_size], dim=-1)
        q_BHTE = torch.cat((q_nope, rotate(q_rope, table)), dim=-1)
        k_BHTE = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        return self.output(y_BHTE.transpose(1, 2).flatten(2))


def make_attention(model: ModelSection) -> nn.Module:
    """The attention that ``model.attention`` names."""
    if model.attention == "mla":
        return LatentAttention(model)
    assert model.hidden_size and model.num_heads and model.num_kv_heads
    return GroupedQueryAttention(model.hidden_size, model.num_heads, model.num_kv_heads, model.rope_theta)
