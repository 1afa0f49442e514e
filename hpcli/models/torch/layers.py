"""What every model is made of. Suffixes give shapes: B batch, T tokens, D hidden size, H heads, K key and value heads, E head size."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn


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


class Linear(nn.Linear):
    """x @ weight.T, without bias; its values are given by build_model."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: drawing values that are thrown away takes torch a millisecond a matrix, even on the meta device."""


class Embedding(nn.Embedding):
    """Rows of weight; its values are given by build_model."""

    def reset_parameters(self) -> None:
        """Nothing, as for Linear."""


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = Linear(width, inner)
        self.up = Linear(width, inner)
        self.down = Linear(inner, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


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
