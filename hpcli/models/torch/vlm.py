"""A decoder that sees an image before the text; its parameters are those of :mod:`hpcli.models.vlm` and the decoder's.

Suffixes give shapes: B batch, P patches, T tokens, D hidden size, S side of a patch, H and W height and width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hpcli.config.schema import ModelSection
from hpcli.models.stages import StageLayers
from hpcli.models.torch.attention import GroupedQueryAttention
from hpcli.models.torch.decoder import Decoder
from hpcli.models.torch.layers import FeedForward, Linear, RMSNorm
from hpcli.models.vlm import image_tokens


class VisionLayer(nn.Module):
    """A decoder's layer whose attention sees all patches."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, eps)
        self.attention = GroupedQueryAttention(width, heads, heads, None, causal=False)
        self.ffn_norm = RMSNorm(width, eps)
        self.ffn = FeedForward(width, inner)

    def forward(self, x_BPD: torch.Tensor) -> torch.Tensor:
        x_BPD = x_BPD + self.attention(self.attention_norm(x_BPD))
        return x_BPD + self.ffn(self.ffn_norm(x_BPD))


class VisionEncoder(nn.Module):
    """Grey images (B, H, W) in [0, 1] to patches (B, P, D)."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.patch_size and model.vision_hidden_size and model.vision_layers and model.norm_eps is not None
        assert model.vision_heads and model.vision_ffn_size
        width, self.side = model.vision_hidden_size, model.patch_size
        self.position = nn.Parameter(torch.empty(image_tokens(model), width))
        self.patch = Linear(self.side**2, width)
        self.layers = nn.ModuleDict(
            {
                str(index): VisionLayer(width, model.vision_heads, model.vision_ffn_size, model.norm_eps)
                for index in range(model.vision_layers)
            }
        )
        self.norm = RMSNorm(width, model.norm_eps)

    def forward(self, images_BHW: torch.Tensor) -> torch.Tensor:
        rows = images_BHW.unflatten(1, (-1, self.side)).unflatten(3, (-1, self.side))
        patches_BPS = rows.transpose(2, 3).flatten(3).flatten(1, 2)
        x_BPD = self.patch(patches_BPS.to(self.patch.weight.dtype)) + self.position
        for layer in self.layers.values():
            x_BPD = layer(x_BPD)
        return self.norm(x_BPD)


class Projector(nn.Module):
    """From the vision encoder's width to the decoder's."""

    def __init__(self, width: int, text_width: int) -> None:
        super().__init__()
        self.up = Linear(width, text_width)
        self.down = Linear(text_width, text_width)

    def forward(self, x_BPD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BPD)))


class VisionLanguageModel(Decoder):
    """Token ids (B, T), int64, and images (B, H, W), float32, to logits (B, P + T, V): those of image positions come first."""

    def __init__(self, model: ModelSection, stage: StageLayers) -> None:
        super().__init__(model, stage)
        if stage.first:
            assert model.vision_hidden_size and model.hidden_size
            self.vision = VisionEncoder(model)
            self.projector = Projector(model.vision_hidden_size, model.hidden_size)
            self.enter = nn.Identity()  # where sequence parallelism splits what is put together here

    def forward(self, x: torch.Tensor, images_BHW: torch.Tensor | None = None) -> torch.Tensor:
        if not self.stage.first:
            return self.decode(x)
        assert images_BHW is not None
        image_BPD = self.projector(self.vision(images_BHW))
        return self.decode(self.enter(torch.cat((image_BPD, self.embedding(x)), dim=1)))
