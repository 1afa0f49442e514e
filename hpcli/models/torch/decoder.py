"""The decoder as a torch module, or one pipeline stage of it; its parameters are those of :mod:`hpcli.models.decoder`.

Suffixes give shapes: B batch, T tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from hpcli.config.schema import ModelSection
from hpcli.models.feed_forward import has_experts
from hpcli.models.stages import StageLayers
from hpcli.models.torch.attention import make_attention
from hpcli.models.torch.layers import Embedding, FeedForward, Linear, RMSNorm
from hpcli.models.torch.moe import MixtureOfExperts


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, model: ModelSection, index: int) -> None:
        super().__init__()
        assert model.hidden_size and model.norm_eps is not None
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = make_attention(model)
        self.ffn_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.feed_forward_name = "moe" if has_experts(model, index) else "ffn"
        if self.feed_forward_name == "moe":
            self.moe = MixtureOfExperts(model)
        else:
            assert model.ffn_size
            self.ffn = FeedForward(model.hidden_size, model.ffn_size)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        feed_forward = self.get_submodule(self.feed_forward_name)
        return x_BTD + feed_forward(self.ffn_norm(x_BTD))


class Decoder(nn.Module):
    """Token ids (B, T), int64, to logits (B, T, V) in the compute dtype. A later stage takes hidden states (B, T, D), an earlier
    one returns them."""

    def __init__(self, model: ModelSection, stage: StageLayers) -> None:
        super().__init__()
        assert model.vocab_size and model.hidden_size and model.norm_eps is not None
        self.stage = stage
        if stage.first:
            self.embedding = Embedding(model.vocab_size, model.hidden_size)
        # a dictionary: a layer's name is its place in the whole model, whatever stage it is on
        self.layers = nn.ModuleDict({str(index): Layer(model, index) for index in range(stage.start, stage.stop)})
        if stage.last:
            self.norm = RMSNorm(model.hidden_size, model.norm_eps)
            self.head = Linear(model.hidden_size, model.vocab_size)
            if model.tie_embeddings and stage.first:
                self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.embedding(x) if self.stage.first else x)

    def decode(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """From the first layer here on."""
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD)) if self.stage.last else x_BTD
