"""Shared by the tests that run in one process, without a process group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

MakeParameter = Callable[..., torch.nn.Parameter]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def parameter() -> MakeParameter:
    """``parameter([3.0, 4.0])``: a parameter of zeros with that gradient; None for no gradient."""

    def make(gradient: list | torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
        if gradient is None:
            return torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        if not isinstance(gradient, torch.Tensor):
            gradient = torch.tensor(gradient, dtype=dtype)
        made = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        made.grad = gradient
        return made

    return make
