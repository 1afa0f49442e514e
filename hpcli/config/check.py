"""Values against the models; what pydantic finds wrong, said in this project's words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from hpcli.config import describe
from hpcli.config.errors import SHOWN_PROBLEMS, Problem, dotted, shorten
from hpcli.config.scalars import number_hint, parse_extended
from hpcli.config.schema import SECTIONS, Config
from hpcli.config.suggest import nearest, unknown_key
from hpcli.config.tree import Place

Path = describe.Path

FLOAT16_STORAGE = (
    "storage in float16 loses small updates and overflows at 65504; allowed: float32 or bfloat16 "
    "(compute_dtype may be float16)"
)


def check(value: dict[str, Any], places: dict[Path, Place]) -> tuple[Config | None, list[Problem]]:
    """The configuration that `value` describes, or what is wrong with it."""
    given = {key: part for key, part in value.items() if part is not None or key not in SECTIONS}
    try:
        return Config.model_validate(given), []
    except ValidationError as error:
        problems: dict[tuple[str, str], Problem] = {}
        for found in error.errors(include_url=False, include_context=False, include_input=False):
            path = found["loc"]
            if found["type"] == "missing" or found["type"] == "too_short":
                path = path[:-1] if isinstance(path[-1], int) else path
            detailed = len(problems) < SHOWN_PROBLEMS  # the rest is only counted
            if found["type"] == "extra_forbidden":
                message = unknown_key(path) if detailed else "unknown key"
            else:
                message = explain(path, _get(value, path), places.get(path))
            place = nearest_place(path, places)
            key = dotted(path)
            problems.setdefault((key, message), Problem(place.source, place.line, None, key, message))
        return None, list(problems.values())


def nearest_place(path: Sequence[str | int], places: dict[Path, Place]) -> Place:
    """Where a key stands, or the innermost section around it that is there."""
    here = tuple(path)
    while here and here not in places:
        here = here[:-1]
    place = places[here]
    return place if here else place._replace(line=None)


def _get(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def show(value: Any, place: Place | None) -> str:
    """A value as the file has it, shortened."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None:
        return "null" if place is not None and place.text else "nothing"
    text = place.text if place is not None and place.text is not None else str(value)
    if place is not None and place.quoted:
        return f'"{shorten(text)}"'
    return shorten(text)


def explain(path: Path, value: Any, place: Place | None) -> str:
    """What is wrong with a value, what is allowed, and how to write what was probably meant."""
    fragment = describe.at(path) or {}
    shown = show(value, place)
    text = place.text if place is not None and place.text is not None else ""
    quoted = place is not None and place.quoted
    types, words = describe.types(fragment), describe.words(fragment)
    permitted = f"allowed: {describe.allowed(fragment)}"

    if describe.properties(fragment):
        return _not_a_section(path, fragment, shown)
    if value is None:
        return f"has no value; {permitted}"
    if isinstance(value, dict):
        return f"is a value, not a section; {permitted}"
    if "boolean" in types:
        return f"{shown} is not a boolean; write true or false"
    if "array" in types:
        if isinstance(value, list):
            return f"a list of {len(value)} is not of the right length; {permitted}"
        return f"{shown} is not a list; {permitted}{_as_list(fragment, shown, value)}"
    if isinstance(value, list):
        return f"is a list; {permitted}"
    if words and not types & {"number", "integer"}:
        if path == ("training", "params_dtype") and str(value).lower() in ("float16", "fp16", "half"):
            return f"{shown}: {FLOAT16_STORAGE}"
        near = nearest("none" if value is False and "none" in words else str(value), words)
        guess = f"did you mean '{near}'? A" if near else "a"
        return f"{shown} is not a value of this key; {guess}{permitted[1:]}"
    if types & {"number", "integer"}:
        value = parse_extended(value) if "inf" in words else value
        return _not_that_number(fragment, value, shown, text, quoted, permitted)
    if isinstance(value, str):
        return f"{shown} is not usable text; {permitted}" if value else f"is empty; {permitted}"
    return f"{shown} is {_kind(value)}, not text; put it in quotes"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    return "a number" if isinstance(value, int | float) else "text"


def _not_a_section(path: Path, fragment: describe.Fragment, shown: str) -> str:
    keys = list(describe.properties(fragment))
    example = f"{{{keys[0]}: {shown}}}" if path == ("model",) else f"{{{keys[0]}: ...}}"
    listed = ", ".join(keys[:6]) + (", ..." if len(keys) > 6 else "")
    return f"{shown} is not a section; write keys below it ({listed}), or {path[-1]}: {example}"


def _as_list(fragment: describe.Fragment, shown: str, value: Any) -> str:
    if isinstance(value, str) and not any("prefixItems" in f for f in describe.alternatives(fragment)):
        return f"; write [{shown}]"
    return ""


def _not_that_number(
    fragment: describe.Fragment, value: Any, shown: str, text: str, quoted: bool, permitted: str
) -> str:
    whole = "number" not in describe.types(fragment)
    wanted = "a whole number" if whole else "a number"
    if isinstance(value, str):
        hint = number_hint(text or value, quoted)
        advice = f"; {hint}" if hint else ""
        return f"{shown} is text, not {wanted}{advice}; {permitted}"
    if isinstance(value, bool):
        return f"{shown} is a boolean, not {wanted}; {permitted}"
    enormous = isinstance(value, float) and math.isinf(value) and text[-1:].isdigit()
    if whole and isinstance(value, float) and not enormous:
        advice = f"; write {int(value)}" if abs(value) < 1e15 and value.is_integer() else ""
        return f"{shown} is not a whole number{advice}; {permitted}"
    if isinstance(value, float) and math.isnan(value):
        return f"{shown} is not a number; {permitted}"
    return f"{shown} is out of range; {permitted}"
