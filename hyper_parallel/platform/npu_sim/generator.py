"""Random numbers of the simulated device: a seed and an offset, as the counter-based generators of accelerators have.

The state is 16 bytes, so that DTensor's random operations, which set the offset themselves, work unchanged. Each operation
that draws gets a CPU generator seeded by both, and moves the offset on: the same state gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch

_STEP = 4  # offsets of Philox generators are multiples of 4
_host = torch.Generator("cpu")
_seed = 0
_offset = 0


def manual_seed(seed: int) -> None:
    """Start anew with ``seed``."""
    global _seed, _offset
    _seed, _offset = int(seed) % 2**63, 0


def initial_seed() -> int:
    """The seed that was set last."""
    return _seed


def get_state() -> torch.Tensor:
    """Seed and offset as 16 bytes, (16,) uint8 on the CPU."""
    return torch.tensor([_seed, _offset], dtype=torch.int64).view(torch.uint8)


def set_state(state: torch.Tensor) -> None:
    """Set what :func:`get_state` returned.

    Raises:
        ValueError: not 16 bytes.
    """
    global _seed, _offset
    if state.dtype != torch.uint8 or state.numel() != 16:
        raise ValueError(f"a state of the simulated NPU is 16 bytes (seed and offset), not {state.numel()} x {state.dtype}")
    _seed, _offset = state.cpu().clone().view(torch.int64).tolist()


def advance(keyword_arguments: dict[str, Any] | None) -> None:
    """Have the next operation draw from this device's numbers. ``None``: it takes no generator, and uses torch's default one,
    which is left as it is."""
    global _offset
    if keyword_arguments is not None and keyword_arguments.get("generator") is None:
        _host.manual_seed((_seed * 0x9E3779B97F4A7C15 + _offset) % 2**63)
        keyword_arguments["generator"] = _host
        _offset += _STEP
