"""Types of single fields that pydantic does not have."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from hpcli.config.scalars import parse_extended

LARGEST_WORLD = 2**20  # ranks


def _as_json(value: float) -> float | str:
    """JSON has no infinity, so it is written as text, which the same field reads back."""
    return ("inf" if value > 0 else "-inf") if math.isinf(value) else value


def _refuse_meaningless_p(value: float) -> float:
    if math.isnan(value) or -math.inf < value < 0:
        raise ValueError("not the p of a norm")
    return value


def _refuse_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 is neither a number of ranks nor the -1 that fills")
    return value


def _number_or(*words: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"enum": list(words)}]})


_ReadInfinity = BeforeValidator(parse_extended)
_WriteInfinity = PlainSerializer(_as_json, when_used="json")
MaxNorm = Annotated[float, Field(ge=0, allow_inf_nan=True), _ReadInfinity, _WriteInfinity, _number_or("inf")]
NormType = Annotated[
    float,
    Field(allow_inf_nan=True),
    AfterValidator(_refuse_meaningless_p),
    _ReadInfinity,
    _WriteInfinity,
    _number_or("inf", "-inf"),
]
Beta = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, Field(min_length=1)]
ShardDegree = Annotated[int, Field(ge=-1, le=LARGEST_WORLD), AfterValidator(_refuse_zero)]
