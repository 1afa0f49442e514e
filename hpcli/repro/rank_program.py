"""Each rank's part of re-enacting a fault: run one side or both, and tell what came out. It judges nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcli.faults.attempt import attempt
from hpcli.faults.registry import load_file
from hpcli.launch.context import RankContext
from hpcli.launch.rank import load_function


def run(context: RankContext, payload: dict[str, Any]) -> None:
    """Run the ``sides`` of the entry in the file ``module`` inside a process group on ``device``."""
    import hyper_parallel

    if context.store_path:
        os.chdir(Path(context.store_path).parent)  # MindSpore writes into the current folder where something fails
    if payload["prepare"]:
        load_function(payload["prepare"])()
    module = load_file(payload["module"])
    hyper_parallel.init(
        payload["platform"],
        payload["device"],
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout_seconds=context.timeout_seconds,
        strict_dtypes=payload["strict_dtypes"],
    )
    for side in payload["sides"]:
        context.progress(1, "gradient norm")
        context.emit({"rank": context.rank, "side": side, "value": attempt(_function(module, side))})
    # No barrier: a rank that hangs must keep none of the others. The launcher lets them leave together.


def _function(module: ModuleType, side: str) -> Callable[[], Any]:
    if side == "right" or hasattr(module, "wrong"):
        function: Callable[[], Any] = getattr(module, side)
        return function

    def with_the_rule_reverted() -> Any:
        module.patch()
        return module.right()

    return with_the_rule_reverted
