"""Events of a small run, as rank 0 emits them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

Event = dict[str, Any]


def rows_of(
    world_size: int, norm: float = 0.776062, odd: dict[int, float] | None = None, **fields: Any
) -> list[Event]:
    """The rows of a norm table; ``odd`` gives single ranks another norm."""
    odd = odd or {}
    return [
        {
            "rank": rank,
            "host": "node17",
            "device": f"cuda:{rank % 8}",
            "coordinates": {"pp": 0, "dp_replicate": rank % 2, "dp_shard": rank // 2, "tp": 0},
            "with_gradient": 38,
            "without_gradient": 1,
            "local_norm": 0.2743805,
            "contributed": 0.2743805,
            "global_norm": odd.get(rank, norm),
            **fields,
        }
        for rank in range(world_size)
    ]


def start_of(world_size: int = 8, steps: int = 4) -> Event:
    return {
        "event": "start",
        "config_file": "examples/configs/fsdp8.yaml",
        "output": "runs/fsdp8",
        "world_size": world_size,
        "steps": steps,
        "parameters": 1054464,
        "mesh": {"dp_shard": world_size},
        "platform": "torch",
        "device": "cpu",
        "dtypes": {"params": "float32", "compute": "bfloat16", "reduce": "float32"},
        "model": "decoder-small",
        "tokens_per_step": 4096,
        "notices": ["[bold]not markup[/bold]"],
        "versions": {"torch": "2.13.0"},
        "ranks": [
            {"rank": rank, "host": "vm", "device": "cpu", "coordinates": {}} for rank in range(world_size)
        ],
    }


def step_of(step: int, **fields: Any) -> Event:
    return {
        "event": "step",
        "step": step,
        "loss": 5.5 / step,
        "grad_norm": 0.776062,
        "clip_coefficient": 1.0,
        "lr": 0.001,
        "tokens": 4000,
        "seconds": 0.1,
        "tokens_per_second": 12345.4,
        "skipped": False,
        "skip_reason": None,
        **fields,
    }


def table_of(step: int, rows: list[Event]) -> Event:
    return {"event": "norm_table", "step": step, "rows": rows}


def end_of(steps: int = 4) -> Event:
    return {"event": "end", "steps": steps, "seconds": 62.0, "first_loss": 5.5, "last_loss": 1.375}


def whole_run(world_size: int = 8, steps: int = 4, **table_fields: Any) -> list[Event]:
    steps_ = [step_of(step) for step in range(1, steps + 1)]
    table = table_of(steps, rows_of(world_size, **table_fields))
    return [start_of(world_size, steps), *steps_, table, end_of(steps)]


@pytest.fixture
def events() -> SimpleNamespace:
    """The builders above, for tests to put together what they need."""
    return SimpleNamespace(
        rows=rows_of, start=start_of, step=step_of, table=table_of, end=end_of, whole_run=whole_run
    )
