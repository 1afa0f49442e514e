"""The models as a JSON schema for editors and as Markdown for the README."""

from __future__ import annotations

import copy
from typing import Any

from hpcli.config import describe
from hpcli.models.presets import PRESETS


def json_schema() -> dict[str, Any]:
    """A JSON schema (2020-12) of the YAML file, for editors that complete and check."""
    schema = copy.deepcopy(describe.root())
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["type"] = ["object", "null"]  # a section without keys has its defaults
        _tidy(definition)
    _tidy(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "hpcli configuration",
        "description": "A training run of hpcli.",
    }


def _tidy(definition: dict[str, Any]) -> None:
    for name, fragment in definition.get("properties", {}).items():
        fragment["title"] = name
        if "$ref" in fragment:
            fragment.setdefault("description", describe.follow(fragment)["description"])
        if fragment.get("default", 0) is None:
            del fragment["default"]  # an editor would insert `null`


def yaml_reference() -> str:
    """Every key as Markdown: a table for each section, and one of the presets' sizes."""
    top = describe.root()
    plain = {key: part for key, part in top["properties"].items() if not describe.properties(part)}
    parts = [_table("Top level", "", plain)]
    for name, fragment in describe.sections():
        text = fragment.get("description") or describe.follow(fragment)["description"]
        keys = {k: p for k, p in describe.properties(fragment).items() if not describe.properties(p)}
        parts.append(_table(f"`{name}`", text, keys))
        if name == "model":
            parts.append(_presets())
    return "\n".join(parts)


def _table(title: str, text: str, keys: dict[str, Any]) -> str:
    lines = [f"#### {title}", ""]
    if text:
        lines += [text, ""]
    lines += ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for key, fragment in keys.items():
        meaning = fragment.get("description", "")
        cells = (f"`{key}`", describe.allowed(fragment), f"`{_default(fragment)}`", meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(fragment: dict[str, Any]) -> str:
    value = fragment.get("default")
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "[]" if fragment.get("type") == "array" else "null"
    return str(value)


def _presets() -> str:
    sizes = list(dict.fromkeys(key for preset in PRESETS.values() for key in preset))
    lines = [
        "| size | " + " | ".join(f"`{name}`" for name in PRESETS) + " |",
        "|---" * (len(PRESETS) + 1) + "|",
    ]
    for key in sizes:
        values = [_default({"default": preset.get(key)}) for preset in PRESETS.values()]
        lines.append(f"| `{key}` | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"
