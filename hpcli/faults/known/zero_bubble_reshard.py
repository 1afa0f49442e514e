"""A zero-bubble schedule over parameters that FSDP2 frees after forward, as is its default."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="zero-bubble schedule with FSDP2's default reshard",
    source="torch 2.13, measured",
    rule="zero-bubble schedules need reshard_after_forward false",
    layout="pp2-zero-bubble-fsdp{half}",
    cause="zero-bubble-reshard",
    wrong="weight gradients computed late, with freed parameters: whole layers without a gradient",
    right="the gradients of any other schedule",
    why="compared with a single process",
)


def patch() -> None:
    from hyper_parallel.platform.torch import parallelize, pipeline

    right = parallelize.fully_shard

    def freed(module: Any, **options: Any) -> Any:
        return right(module, **{**options, "reshard_after_forward": True})

    replace(parallelize, "fully_shard", freed)
    replace(pipeline, "_require_unsharded", lambda module, schedule: None)
