"""The optimizer: torch's AdamW or SGD on float32 master weights, the same implementation with and without offload."""

from __future__ import annotations

import torch
from torch import nn

from hpcli.config.schema import OptimizerSection
from hyper_parallel.core.precision import MixedPrecisionPolicy


class Optimizer:
    """AdamW or plain SGD over the trainable of ``parameters``; weight decay applies to matrices only.

    Sharded parameters are float32 and serve as the master weights. Where they are stored narrower than computed with
    (``storage_rounds_compute``), the master weights are kept here, and what the model sees is rounded after each step.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], settings: OptimizerSection, policy: MixedPrecisionPolicy
    ) -> None:
        trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self.names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self.seen = trainable
        self.storage = getattr(torch, policy.params_dtype) if policy.storage_rounds_compute else None
        self.masters = [nn.Parameter(p.detach().clone()) for p in trainable] if self.storage else trainable
        groups = [
            {"params": [p for p in self.masters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]] or groups[:1]  # a pipeline stage may be frozen as a whole
        self._updates = 0  # no parameter here need have a count of its own
        self.inner: torch.optim.Optimizer
        if settings.name == "adamw":
            self.inner = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
        else:
            # torch 2.13 has no sharding strategy for _fused_sgd_: NotImplementedError on DTensors
            self.inner = torch.optim.SGD(groups, lr=settings.lr, foreach=True)

    def step(self, lr: float) -> None:
        """One update with learning rate ``lr``."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self._updates += 1
        if self.storage is None:
            self.inner.step()
            return
        for master, seen in zip(self.masters, self.seen, strict=True):
            master.grad = seen.grad
        self.inner.step()
        with torch.no_grad():
            for master, seen in zip(self.masters, self.seen, strict=True):
                seen.copy_(master.to(self.storage))

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the next update depends on beside the parameters, by slot and parameter ("exp_avg.norm.weight"), as
        it lies in memory: what is read into these tensors is what the optimizer goes on with."""
        slots = {"exp_avg", "exp_avg_sq"} if isinstance(self.inner, torch.optim.AdamW) else set()
        state = {}
        for name, master in zip(self.names, self.masters, strict=True):
            if self.storage is not None:
                state[f"master.{name}"] = master.detach()
            known = self.inner.state[master]
            if slots and not known:  # as torch fills it in the first step
                known["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                known.update({slot: torch.zeros_like(master, requires_grad=False) for slot in sorted(slots)})
            state |= {f"{slot}.{name}": known[slot] for slot in sorted(slots)}
        return state

    @property
    def updates(self) -> int:
        """How many updates the running means have seen."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        for known in self.inner.state.values():
            if "step" in known:
                known["step"].fill_(count)

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for parameter in (*self.seen, *self.masters):
            parameter.grad = None
