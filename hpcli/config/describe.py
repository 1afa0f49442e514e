"""What a key may hold, in words, from the JSON schema of the models: one wording for messages and README."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from hpcli.config.schema import Config

Fragment = dict[str, Any]
Path = tuple[str | int, ...]


@cache
def root() -> Fragment:
    """The models' JSON schema, as pydantic writes it."""
    return Config.model_json_schema()


def follow(fragment: Fragment) -> Fragment:
    """The fragment itself, or what its `$ref` names."""
    reference = fragment.get("$ref")
    return root()["$defs"][reference.rpartition("/")[2]] if reference else fragment


def alternatives(fragment: Fragment) -> list[Fragment]:
    """The fragments of which a value must match one."""
    fragment = follow(fragment)
    return [follow(part) for part in fragment["anyOf"]] if "anyOf" in fragment else [fragment]


def at(path: Sequence[str | int]) -> Fragment | None:
    """The fragment of a key, None if there is no such key."""
    found: Fragment | None = root()
    for part in path:
        if found is None:
            return None
        if isinstance(part, int):
            lists = [f for f in alternatives(found) if f.get("type") == "array"]
            items = [*lists[0].get("prefixItems", []), lists[0].get("items")] if lists else [None]
            found = items[min(part, len(items) - 1)]
        else:
            found = properties(found).get(part)
    return found


def properties(fragment: Fragment) -> dict[str, Fragment]:
    """The keys that may stand below a key; empty unless it is a section."""
    return next((f["properties"] for f in alternatives(fragment) if "properties" in f), {})


def sections() -> Iterator[tuple[str, Fragment]]:
    """The sections, in their order, as (dotted name, fragment)."""

    def below(name: str, fragment: Fragment) -> Iterator[tuple[str, Fragment]]:
        for key, part in properties(fragment).items():
            if properties(part):
                inner = f"{name}.{key}" if name else key
                yield inner, part
                yield from below(inner, part)

    yield from below("", root())


def types(fragment: Fragment) -> set[str]:
    """The JSON types that a key takes; an enum of texts counts as `string`."""
    return {str(f.get("type", "string")) for f in alternatives(fragment)}


def words(fragment: Fragment) -> list[str]:
    """The texts that a key takes, where they are a fixed list."""
    return [w for f in alternatives(fragment) for w in ([f["const"]] if "const" in f else f.get("enum", []))]


def join(parts: Sequence[str], last: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def number(value: float) -> str:
    """A bound as a person would write it."""
    return str(int(value)) if float(value).is_integer() else repr(value)


def allowed(fragment: Fragment) -> str:
    """Everything that a key takes, such as `a whole number from 1 to 16, or null`."""
    options = alternatives(fragment)
    given = [f for f in options if f.get("type") != "null"]
    texts = [text for f in given for text in (f["enum"] if "enum" in f else [_one(f)])]
    return join(texts) + (", or null" if len(given) < len(options) else "")


def _one(fragment: Fragment) -> str:
    if "const" in fragment:
        return str(fragment["const"])
    kind = fragment.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(fragment)
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        if "prefixItems" in fragment:
            return f"a list of {len(fragment['prefixItems'])}, each {_one(fragment['prefixItems'][0])}"
        return "a list of texts"
    return "a section with keys of its own" if kind == "object" else "text"


def _range(fragment: Fragment) -> str:
    low, above = fragment.get("minimum"), fragment.get("exclusiveMinimum")
    high, below = fragment.get("maximum"), fragment.get("exclusiveMaximum")
    if low == -1:
        return f" from 1 to {number(high)}, or -1" if high is not None else " of at least 1, or -1"
    if low is not None and high is not None:
        return f" from {number(low)} to {number(high)}"
    lower = (
        f"of at least {number(low)}"
        if low is not None
        else f"above {number(above)}"
        if above is not None
        else ""
    )
    upper = (
        f"at most {number(high)}"
        if high is not None
        else f"below {number(below)}"
        if below is not None
        else ""
    )
    return "".join(f" {part}" for part in (lower, "and" if lower and upper else "", upper) if part)
