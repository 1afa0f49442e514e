"""What there is to say about a fault that ``hpcli repro`` re-enacts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from hpcli.faults.attempt import is_raised

CLASSES = {
    "ranks": "which ranks a term is summed over",
    "dtensor": "DTensor mechanics",
    "pipeline": "pipeline parallelism and averaging",
    "missing": "missing gradients and hangs",
    "shards": "empty and uneven shards, norm types",
    "precision": "low precision and non-finite norms",
    "reduce": "reduce dtype and accumulation",
    "offload": "CPU offload",
    "loss-scale": "loss scaling",
    "resume": "resume and parity",
    "launcher": "launchers and lost ranks",
    "config": "mistakes in the configuration",
}

SHOWN_BY = {
    "planted": "the rule of this library is reverted on the ranks",
    "formula": "the formula of the report is run on the ranks",
    "stock": "the stock library is run as it is: it still does this",
    "mended": "the formula is run on the ranks; stock torch has mended it since",
}

ShownBy = Literal["planted", "formula", "stock", "mended"]


class ByRank(NamedTuple):
    """An expectation of its own for each rank. Without it, one holds for all ranks."""

    values: tuple[Any, ...]


class Raises(NamedTuple):
    """An exception is expected.

    Attributes:
        message: what its message must contain.
        kind: the class of the exception.
        through: functions that its traceback must pass, in this order, each as ``end/of/file.py:function``.
    """

    message: str
    kind: str = "RuntimeError"
    through: tuple[str, ...] = ()


class Lost(NamedTuple):
    """A rank that never answers: it hangs or is ended. ``message`` is part of what the launcher says about it."""

    message: str = ""


class Says(NamedTuple):
    """A text that must contain ``part``."""

    part: str


class OneOf(NamedTuple):
    """Any of these, where it depends on which rank is faster."""

    expected: tuple[Any, ...]


class Not(NamedTuple):
    """Any finite number but this one, where how wrong it is depends on the data."""

    value: float


Expected = Any
"""A number, text, truth value, list or dict of these; one of the classes above; or a function of the number of ranks."""


class Entry(NamedTuple):
    """A fault seen in the world, reduced to the smallest condition that shows it.

    The module that defines it as ``ENTRY`` also has ``right()``, which runs the library on every rank and returns what is to be
    compared. The faulty side is ``wrong()``, which runs the faulty formula or the stock library; without it, the rule is
    reverted by ``patch()`` on ranks of their own and ``right()`` is called there.

    Attributes:
        id: as ``hpcli repro`` takes it; the project and the number of the report.
        title: in a few words.
        kind: one of ``CLASSES``.
        source: the public report, as ``repository#number``.
        condition: the smallest setting that shows it.
        shown_by: one of ``SHOWN_BY``.
        wrong, right: what the faulty side and the library must give.
        how_we_know: the hand calculation, or the oracle.
        why: three sentences.
        ranks: how many show it; the first is what runs unless another is asked for.
        seconds: about how long it takes on two cores.
        platform: "torch" or "mindspore".
        device: "cpu", "sim-npu", or "accelerator": the real one where there are enough, else the simulated NPU.
        strict_dtypes: the simulated NPU refuses dtypes as Ascend does.
        tolerance: how far numbers may be off, relative.
        alone: the faulty side hangs or ends its process, so it gets ranks of its own.
        timeout_seconds: how long a collective may wait on the faulty side.
    """

    id: str
    title: str
    kind: str
    source: str
    condition: str
    shown_by: ShownBy
    wrong: Expected
    right: Expected
    how_we_know: str
    why: str
    ranks: tuple[int, ...] = (2,)
    seconds: float = 0.5
    platform: str = "torch"
    device: str = "cpu"
    strict_dtypes: bool = False
    tolerance: float = 1e-6
    alone: bool = False
    timeout_seconds: float = 30.0


def expectations(expected: Expected, ranks: int) -> Sequence[Expected]:
    """What is expected of each rank."""
    if callable(expected):
        expected = expected(ranks)
    return expected.values if isinstance(expected, ByRank) else (expected,) * ranks


def is_one_for_all(expected: Expected, ranks: int) -> bool:
    """Whether every rank must hold the same."""
    return not isinstance(expected(ranks) if callable(expected) else expected, ByRank)


def shown(value: Any) -> Any:
    """A value or an expectation as it is shown: numbers as they are, everything else in words."""
    if isinstance(value, Raises):
        return f"{value.kind}: {value.message}" if value.message else f"some {value.kind}"
    if is_raised(value):
        return f"{value['raised']}: {value['message']}"
    if isinstance(value, Lost):
        return value.message or "no answer"
    if isinstance(value, Says):
        return f"... {value.part} ..."
    if isinstance(value, OneOf):
        return " or ".join(str(shown(one)) for one in value.expected)
    if isinstance(value, Not):
        return f"not {value.value:g}"
    if isinstance(value, dict):
        return {key: shown(entry) for key, entry in value.items()}
    return value


def difference(value: Any, expected: Expected, tolerance: float) -> str:
    """In what a value that a rank returned is not the expected one, in words; empty where it is."""
    if isinstance(expected, OneOf):
        agrees = any(not difference(value, one, tolerance) for one in expected.expected)
        return "" if agrees else f"{shown(value)}, expected {shown(expected)}"
    if isinstance(expected, dict) and isinstance(value, dict) and set(value) == set(expected):
        found = ((key, difference(value[key], expected[key], tolerance)) for key in expected)
        return "; ".join(f"{key}: {text}" for key, text in found if text)
    if isinstance(expected, Raises) and is_raised(value):
        if value["raised"] == expected.kind and expected.message in value["message"]:
            missing = _not_passed(value["through"], expected.through)
            return f"the traceback does not pass {missing}" if missing else ""
    elif _agrees(value, expected, tolerance):
        return ""
    return f"{shown(value)}, expected {shown(expected)}"


def _agrees(value: Any, expected: Expected, tolerance: float) -> bool:
    if isinstance(expected, (Raises, Lost, dict)):
        return False
    if isinstance(expected, Says):
        return isinstance(value, str) and expected.part in value
    if isinstance(expected, Not):
        number = isinstance(value, (int, float)) and math.isfinite(value)
        return number and not math.isclose(value, expected.value, rel_tol=tolerance)
    if isinstance(expected, (list, tuple)):
        same = isinstance(value, list) and len(value) == len(expected)
        return same and not any(difference(a, b, tolerance) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, (bool, str)) or expected is None:
        return type(value) is type(expected) and value == expected
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if math.isnan(expected):
        return math.isnan(value)
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=1e-12)


def _not_passed(frames: Sequence[Sequence[Any]], wanted: Sequence[str]) -> str:
    """The first of the wanted functions that a traceback does not pass, in their order; empty where it passes all."""
    position = 0
    for function in wanted:
        file, _, name = function.rpartition(":")
        at = next((i for i in range(position, len(frames)) if frames[i][0].endswith(file) and frames[i][2] == name), None)
        if at is None:
            return function
        position = at + 1
    return ""
