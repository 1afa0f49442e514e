"""A zero-bubble schedule over parameters that FSDP2 frees after forward, as is its default."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Not
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="zero-bubble schedule with FSDP2's default reshard",
    source="torch 2.13, measured",
    rule="zero-bubble schedules need reshard_after_forward false",
    layout="pp2-zero-bubble-fsdp{half}",
    cause="zero-bubble-reshard",
)
ENTRY = Entry(
    id="probe-zero-bubble",
    title=FAULT.title,
    kind="pipeline",
    source=FAULT.source,
    condition="a decoder on 2 pipeline stages, one step with the interleaved zero-bubble schedule and with "
    "1F1B: the norm of the one over that of the other",
    shown_by="planted",
    wrong=Not(1.0),
    right=1.0,
    tolerance=1e-5,
    how_we_know="a schedule orders the same sums; norms agree to 1e-5",
    why="Zero-bubble schedules compute weight gradients late, when FSDP2 has freed the parameters and takes "
    "its hooks for done. Whole layers stay without a gradient, and nothing raises. With "
    "reshard_after_forward false the parameters are there; anything else is refused.",
    seconds=1.5,
)


def right() -> float:
    from hpcli.faults.training import norm_of

    def norm(schedule: str, interleave: int) -> float:
        return norm_of(
            model={"preset": "decoder-tiny"},
            training={"micro_batch_size": 1, "global_batch_size": 4},
            parallelism={
                "pipeline_parallel": 2,
                "pipeline_parallel_schedule": schedule,
                "pipeline_parallel_interleave_num": interleave,
            },
            fsdp_config={"reshard_after_forward": False, "unit": "layer"},
        )

    return norm("interleaved_zero_bubble", 2) / norm("1f1b", 1)


def patch() -> None:
    from hyper_parallel.platform.torch import parallelize, pipeline

    right = parallelize.fully_shard

    def freed(module: Any, **options: Any) -> Any:
        return right(module, **{**options, "reshard_after_forward": True})

    replace(parallelize, "fully_shard", freed)
    replace(pipeline, "_require_unsharded", lambda module, schedule: None)
