"""The loss of a language model on torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from hpcli.data.text import IGNORED
from hyper_parallel.core.mesh import ParallelMesh


def token_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The sum of cross entropies over the labels that are not ignored, in float32."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class GlobalLoss:
    """This rank's share of the loss of a global batch: its tokens' cross entropies over the valid tokens of all ranks.

    It is multiplied by ``scale`` (a loss scale, else 1).

    With tensor parallelism the logits are cut along the vocabulary and never gathered; every rank of the axis gets the same loss.
    Forward and backward must run inside :meth:`context`.
    """

    def __init__(self, mesh: ParallelMesh, vocabulary: int) -> None:
        self.mesh, self.vocabulary = mesh, vocabulary
        self.valid_tokens = 1
        self.scale = 1.0

    def context(self) -> AbstractContextManager[None]:
        """Where cross entropies of cut logits are understood."""
        if self.mesh.tp == 1:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        context: AbstractContextManager[None] = loss_parallel()
        return context

    def __call__(self, logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        if self.mesh.tp > 1:
            from hyper_parallel.platform.torch.tensor_parallel import cut_along_vocabulary

            logits_BTV = cut_along_vocabulary(logits_BTV, self.mesh, self.vocabulary)
        loss = token_loss(logits_BTV, labels_BT)
        if isinstance(loss, DTensor):
            loss = loss.to_local()
        # divided last: to_local gives a view, and zero-bubble schedules detach the loss in place, which no view allows
        return loss * (self.scale / self.valid_tokens) if self.scale != 1.0 else loss / self.valid_tokens
