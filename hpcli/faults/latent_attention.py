"""A small decoder with latent attention (MLA, as in DeepSeek-V3) in MindSpore, for faults that need the layout of a report.

Suffixes give shapes: B batch, T tokens, D hidden size, H heads, E head size. Imports MindSpore, and must execute nothing while it is
imported: ranks are forked afterwards.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, nn

from hyper_parallel.core.plan import ParallelPlan
from hyper_parallel.platform.mindspore.functional import linear

VOCABULARY, WIDTH, INNER, HEADS, SEQUENCE = 16, 16, 24, 2, 8
LATENT, NOPE, ROPE, VALUE = 8, 4, 2, 4


def plan_of(layers: int) -> ParallelPlan:
    """Tensor and sequence parallelism of :class:`Decoder`: attention by its heads, the vocabulary by its rows."""
    return ParallelPlan(
        layers=tuple(f"layer{i}" for i in range(layers)),
        unit="layer",
        tensor_split={
            "layer*.attention.query_up": 0,
            "layer*.attention.kv_up": 0,
            "layer*.attention.output": 1,
            "layer*.mlp.up": 0,
            "layer*.mlp.down": 1,
            "embedding.weight": 0,
            "head.weight": 0,
        },
        regions=("layer*.attention", "layer*.mlp"),
        embedding="embedding",
        head="head",
        sequence_parallel=True,
    )


def _parameter(name: str, *shape: int) -> ms.Parameter:
    """The same values on every rank, which follow from the name."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape) * 0.3
    return ms.Parameter(ms.Tensor(values.astype(np.float32)), name=name)


class Norm(nn.Cell):
    """RMSNorm."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.weight = _parameter(name, width)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        wide = x.astype(ms.float32)
        normed = wide * mint.rsqrt((wide * wide).mean(-1, keep_dims=True) + 1e-5)
        return (normed * self.weight.astype(ms.float32)).astype(x.dtype)


class LatentAttention(nn.Cell):
    """Causal; keys and values come from one narrow latent, positions from a rotary part that all heads' keys share."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.query_down = _parameter(f"{name}.query_down", LATENT, WIDTH)
        self.query_norm = Norm(f"{name}.query_norm", LATENT)
        self.query_up = _parameter(f"{name}.query_up", HEADS * (NOPE + ROPE), LATENT)
        self.kv_down = _parameter(f"{name}.kv_down", LATENT + ROPE, WIDTH)
        self.kv_norm = Norm(f"{name}.kv_norm", LATENT)
        self.kv_up = _parameter(f"{name}.kv_up", HEADS * (NOPE + VALUE), LATENT)
        self.output = _parameter(f"{name}.output", WIDTH, HEADS * VALUE)

    def construct(self, x_BTD: ms.Tensor) -> ms.Tensor:
        batch, tokens = x_BTD.shape[:2]
        query = linear(self.query_norm(linear(x_BTD, self.query_down)), self.query_up)
        q_BHTE = _heads(query, NOPE + ROPE)
        down = linear(x_BTD, self.kv_down).astype(ms.float32)
        latent, k_rope = down[..., :LATENT].astype(x_BTD.dtype), down[..., LATENT:]
        kv_BHTE = _heads(linear(self.kv_norm(latent), self.kv_up), NOPE + VALUE)
        q_rope = _rotated(q_BHTE[..., NOPE:])
        k_rope = _rotated(k_rope.reshape((batch, 1, tokens, ROPE)))
        # a query's product with a key is that of the parts without position, and that of the rotary parts
        scores = mint.matmul(q_BHTE[..., :NOPE], kv_BHTE[..., :NOPE].transpose((0, 1, 3, 2)))
        scores = scores + mint.matmul(q_rope, k_rope.transpose((0, 1, 3, 2)))
        future = ms.Tensor(np.triu(np.full((tokens, tokens), -1e9, np.float32), 1))
        weights = mint.softmax(scores * (NOPE + ROPE) ** -0.5 + future, -1)
        y_BTHE = mint.matmul(weights, kv_BHTE[..., NOPE:]).transpose((0, 2, 1, 3))
        return linear(y_BTHE.reshape((batch, tokens, -1)).astype(x_BTD.dtype), self.output)


def _heads(x_BTD: ms.Tensor, size: int) -> ms.Tensor:
    """(B, T, H * E) as (B, H, T, E) in float32."""
    batch, tokens, width = x_BTD.shape
    return x_BTD.astype(ms.float32).reshape((batch, tokens, width // size, size)).transpose((0, 2, 1, 3))


def _rotated(x_BHTE: ms.Tensor) -> ms.Tensor:
    """Rotary positions on pairs (i, i + E/2)."""
    tokens, half = x_BHTE.shape[2], x_BHTE.shape[3] // 2
    angle = np.arange(tokens)[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = (ms.Tensor(f(angle).astype(np.float32)) for f in (np.cos, np.sin))
    first, second = x_BHTE[..., :half], x_BHTE[..., half:]
    return mint.cat((first * cos - second * sin, second * cos + first * sin), -1)


class FeedForward(nn.Cell):
    """Two matrices with a square between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up = _parameter(f"{name}.up", INNER, WIDTH)
        self.down = _parameter(f"{name}.down", WIDTH, INNER)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        hidden = linear(x, self.up)
        return linear(hidden * hidden, self.down)


class Layer(nn.Cell):
    """Attention and a feed-forward network, each on a norm and added to what it came from."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.attention_norm = Norm(f"{name}.attention_norm", WIDTH)
        self.attention = LatentAttention(f"{name}.attention")
        self.mlp_norm = Norm(f"{name}.mlp_norm", WIDTH)
        self.mlp = FeedForward(f"{name}.mlp")

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Cell):
    """Rows of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _parameter("embedding", VOCABULARY, WIDTH)

    def construct(self, ids: ms.Tensor) -> ms.Tensor:
        return self.weight.astype(ms.float32)[ids].astype(self.weight.dtype)


class Head(nn.Cell):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _parameter("head", VOCABULARY, WIDTH)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return linear(x, self.weight)


class Decoder(nn.Cell):
    """The stage of a decoder that has ``layers``, and first and last what is before and after them."""

    def __init__(self, layers: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        self.names = [f"layer{i}" for i in layers]
        self.first, self.last = first, last
        if first:
            self.embedding = Embedding()
        for name in self.names:
            setattr(self, name, Layer(name))
        if last:
            self.norm = Norm("norm", WIDTH)
            self.head = Head()

    def construct(self, x: Any) -> ms.Tensor:
        if self.first:
            x = self.embedding(x)
        for name in self.names:
            x = getattr(self, name)(x)
        return self.head(self.norm(x)) if self.last else x
