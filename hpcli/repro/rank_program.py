"""Each rank's part of re-enacting a fault: run one side or both, and tell what came out. It judges nothing."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hpcli.faults.registry import load_file
from hpcli.launch.context import RankContext
from hpcli.launch.rank import load_function

_LONGEST_MESSAGE = 2000


def run(context: RankContext, payload: dict[str, Any]) -> None:
    """Run the ``sides`` of the entry in the file ``module`` inside a process group on ``device``."""
    import hyper_parallel

    if payload["prepare"]:
        load_function(payload["prepare"])()
    module = load_file(payload["module"])
    hyper_parallel.init(
        "torch",
        payload["device"],
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout_seconds=context.timeout_seconds,
        strict_dtypes=payload["strict_dtypes"],
    )
    for side in payload["sides"]:
        context.progress(1, "gradient norm")
        context.emit({"rank": context.rank, "side": side, **outcome_of(_function(module, side))})
    # No barrier: a rank that hangs must keep none of the others. The launcher lets them leave together.


def _function(module: ModuleType, side: str) -> Callable[[], Any]:
    if side == "right" or hasattr(module, "wrong"):
        function: Callable[[], Any] = getattr(module, side)
        return function

    def with_the_rule_reverted() -> Any:
        module.patch()
        return module.right()

    return with_the_rule_reverted


def outcome_of(function: Callable[[], Any]) -> dict[str, Any]:
    """What ``function`` returns, or the exception that it raises and the functions that this passed, outermost first."""
    try:
        return {"value": _as_data(function())}
    except Exception as error:  # noqa: BLE001 (an exception is what many faults are)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        return {
            "raised": type(error).__name__,
            "message": str(error)[:_LONGEST_MESSAGE],
            "through": [[frame.filename, frame.lineno, frame.name] for frame in frames],
        }


def _as_data(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _as_data(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_data(entry) for entry in value]
    return value
