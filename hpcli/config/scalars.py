"""What an unquoted YAML scalar means: the core schema of YAML 1.2, and nothing from YAML 1.1.

So `1e-5` is a number, `on`, `off`, `yes`, `no`, `1:30` and `2024-01-01` are text. Two readings on which YAML
versions disagree, `010` and `1_000`, stay text; a number field then refuses them with a hint.
https://yaml.org/spec/1.2.2/#1032-tag-resolution
"""

from __future__ import annotations

import math
import re

_WORDS: dict[str, bool | float | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,299})")  # longer ones fit no field and not even a float
_BASED = re.compile(r"0o[0-7]{1,99}|0x[0-9a-fA-F]{1,99}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


def resolve_plain(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _LEADING_ZERO.fullmatch(text):
        return text
    if _FLOAT.fullmatch(text):
        return float(text)
    infinity = _INFINITY.fullmatch(text)
    if infinity:
        return -math.inf if infinity[1] == "-" else math.inf
    if _NAN.fullmatch(text):
        return math.nan
    return text


def number_hint(text: str, quoted: bool) -> str:
    """What to write instead of a text that was meant as a number; empty if it was not."""
    bare = text.strip()
    value = resolve_plain(bare)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "remove the quotes" if quoted else ""
    plain = re.sub(r"(?<=[0-9])[,_' ](?=[0-9])", "", bare)
    if _LEADING_ZERO.fullmatch(plain):
        sign, digits = re.fullmatch(r"([-+]?)0+([0-9]+)", plain).groups()  # type: ignore[union-attr]
        plain = sign + digits
    if plain != bare and len(plain) <= 20 and isinstance(resolve_plain(plain), int | float):
        return f"write {plain}"
    return ""


def parse_extended(value: object) -> object:
    """`inf`, `-inf` and numbers written as text, for the fields that take them so; the rest unchanged."""
    if not isinstance(value, str):
        return value
    words = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf}
    number = words.get(value.strip().lower(), resolve_plain(value.strip()))
    return number if isinstance(number, int | float) and not isinstance(number, bool) else value
