"""A feed-forward layer of routed experts, dropless: every token reaches all of its experts.

Suffixes give shapes: N tokens, D hidden size, F inner width, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hpcli.config.schema import ModelSection
from hpcli.models.torch.layers import FeedForward, Linear
from hyper_parallel.platform.torch.expert_parallel import ExpertDispatch


class Experts(nn.Module):
    """The experts of a layer, stacked; on each rank those that expert parallelism leaves there."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        self.dispatch = ExpertDispatch(experts)

    def forward(self, x_ND: torch.Tensor, expert_NK: torch.Tensor) -> torch.Tensor:
        """What each token's experts make of it, (N * K, D). (A view would lose FSDP2's hook to an operation in place.)"""
        rows_MD = x_ND.unsqueeze(1).expand(-1, expert_NK.shape[1], -1).flatten(0, 1)
        return self.dispatch(rows_MD, expert_NK.flatten(), self._compute)

    def _compute(self, rows_MD: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """``counts`` rows for each expert here, in order. An expert without tokens gets zero gradients, not none."""
        weights = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat(
            [
                F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
                for rows, (gate, up, down) in zip(rows_MD.split(counts), weights, strict=True)
            ]
        )


class Router(Linear):
    """Softmax scores of every expert for every token, (N, E), computed in float32 whatever the dtype of x."""

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        return F.linear(x_ND.float(), self.weight.float()).softmax(-1)


class MixtureOfExperts(nn.Module):
    """Each token goes to the ``experts_per_token`` experts of the largest softmax scores, which are scaled to add up to 1
    (Shazeer et al., 2017; the scaling as in Mixtral), and to the shared experts. There is no auxiliary loss.

    The score of one expert alone is not scaled (as in Fedus et al., "Switch Transformers", 2021): it would always be 1, and the
    router would have no gradient.
    """

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.hidden_size and model.num_experts and model.expert_ffn_size and model.experts_per_token
        self.experts_per_token = model.experts_per_token
        self.router = Router(model.hidden_size, model.num_experts)
        self.experts = Experts(model.num_experts, model.hidden_size, model.expert_ffn_size)
        shared = (model.num_shared_experts or 0) * model.expert_ffn_size
        self.shared = FeedForward(model.hidden_size, shared) if shared else None

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_ND = x_BTD.flatten(0, -2)
        weight_NK, expert_NK = self.router(x_ND).topk(self.experts_per_token, dim=-1)
        if self.experts_per_token > 1:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        out_NKD = self.experts(x_ND, expert_NK).unflatten(0, expert_NK.shape)
        out_ND = (out_NKD * weight_NK.to(out_NKD.dtype).unsqueeze(-1)).sum(1)
        if self.shared is not None:
            out_ND = out_ND + self.shared(x_ND)
        return out_ND.view_as(x_BTD)
