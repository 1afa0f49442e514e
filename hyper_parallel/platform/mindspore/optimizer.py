"""Optimizers for the float32 shards of MindSpore parameters, and a guard that an optimizer does something at all.

MindSpore 2.10 on a CPU: ``mint.optim.Adam`` and ``mint.optim.SGD`` return True and change nothing, ``mint.optim.AdamW`` has no kernel,
and none knows parameters in bfloat16. These work on every device, with and without offload, on whatever the shards are stored in, and
give torch's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms

from hyper_parallel.core.precision import dtype_name
from hyper_parallel.platform.mindspore.layout import gradient_of, zero_grad
from hyper_parallel.platform.mindspore.tensors import copied, writable, zeros


class IneffectiveOptimizerError(RuntimeError):
    """An optimizer step returned and no parameter changed."""


class Optimizer:
    """What the optimizers below share: parameters, a learning rate that may be changed between steps, and tensors of state.

    Args:
        parameters: float32, those that are to be trained; each has its gradient in ``grad`` (or ``main_grad``) at :meth:`step`.
        lr: learning rate.

    Raises:
        ValueError: no parameter, or one that is not float32.
    """

    def __init__(self, parameters: Iterable[ms.Parameter], lr: float) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("the optimizer was given no parameter to train")
        for parameter in self.parameters:
            if dtype_name(parameter.dtype) != "float32":
                raise ValueError(
                    f"{parameter.name} is {parameter.dtype}; optimizer state and master weights are float32: pass mp_policy to fully_shard"
                )
        self.lr = lr
        self.steps = [0] * len(self.parameters)  # of each: torch counts those with a gradient, too
        self.state: dict[str, list[ms.Tensor]] = {}

    def step(self) -> None:
        """Change the parameters by their gradients; those without a gradient stay."""
        for index, parameter in enumerate(self.parameters):
            gradient = gradient_of(parameter)
            if gradient is not None:
                self.steps[index] += 1
            if gradient is not None and parameter.size:
                state = {name: writable(tensors[index]) for name, tensors in self.state.items()}
                self._update(writable(parameter), writable(gradient), state, self.steps[index])

    def zero_grad(self) -> None:
        """Drop the gradients."""
        zero_grad(self.parameters)

    def _update(self, parameter: Any, gradient: Any, state: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    def _add_state(self, name: str) -> None:
        self.state[name] = [zeros(parameter.shape, parameter.dtype) for parameter in self.parameters]


class AdamW(Optimizer):
    """Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), as ``torch.optim.AdamW`` computes it.

    Args:
        betas: decay of the averages of the gradient and of its square.
        eps: added to the root of the latter.
        weight_decay: per step, times ``lr``.
    """

    def __init__(
        self,
        parameters: Iterable[ms.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, lr)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self._add_state("exp_avg")
        self._add_state("exp_avg_sq")

    def _update(self, parameter: Any, gradient: Any, state: dict[str, Any], step: int) -> None:
        first, second = self.betas
        average, square = state["exp_avg"], state["exp_avg_sq"]
        if self.weight_decay:
            parameter.mul_(1 - self.lr * self.weight_decay)
        average.add_(gradient - average, alpha=1 - first)
        square.mul_(second)
        square.add_(gradient * gradient, alpha=1 - second)
        root = square.sqrt() / (1 - second**step) ** 0.5 + self.eps
        parameter.add_(average / root, alpha=-self.lr / (1 - first**step))


class SGD(Optimizer):
    """Stochastic gradient descent, with weight decay added to the gradient as ``torch.optim.SGD`` does.

    Args:
        weight_decay: times the parameter, added to its gradient.
    """

    def __init__(self, parameters: Iterable[ms.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, lr)
        self.weight_decay = weight_decay

    def _update(self, parameter: Any, gradient: Any, state: dict[str, Any], step: int) -> None:
        if self.weight_decay:
            gradient = gradient + parameter * self.weight_decay
        parameter.add_(gradient, alpha=-self.lr)


def guarded_step(step: Callable[[], object], parameters: Sequence[ms.Parameter]) -> None:
    """Take an optimizer's step, and check that it did anything.

    Looks at the largest gradient of this rank alone, so it costs one copy of one parameter; meant for the first step of a run.

    Args:
        step: takes the step.
        parameters: what it should change.

    Raises:
        IneffectiveOptimizerError: the parameter with the largest gradient is what it was before.
    """
    candidates = [(_largest(gradient_of(p)), i) for i, p in enumerate(parameters) if gradient_of(p) is not None]
    largest, index = max(candidates, default=(0.0, 0))
    before = copied(parameters[index]) if largest else None
    step()
    if before is not None and bool((writable(before) == writable(parameters[index])).all()):
        raise IneffectiveOptimizerError(
            f"the optimizer step returned and left {parameters[index].name} as it was, with a gradient of up to {largest:g}. "
            "mint.optim.Adam and mint.optim.SGD do so on a CPU in MindSpore 2.10; hyper_parallel.platform.mindspore.optimizer works"
        )


def _largest(gradient: ms.Tensor | None) -> float:
    return float(writable(gradient).abs().max()) if gradient is not None and gradient.size else 0.0
