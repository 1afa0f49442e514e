"""The JSON schema, the README's reference, and what importing the package costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from hpcli.config import describe, json_schema, yaml_reference
from hpcli.models.presets import PRESETS


def sections(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    yield from (part for part in schema["$defs"].values() if "properties" in part)


def test_json_schema_serves_an_editor():
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    for section in sections(schema):
        assert section["additionalProperties"] is False
        assert section["title"]
        for key, part in section["properties"].items():
            assert part["title"] == key
            assert part["description"].strip()
    training = schema["$defs"]["TrainingSection"]
    assert training["type"] == ["object", "null"]
    assert training["properties"]["steps"]["minimum"] == 1
    assert training["properties"]["params_dtype"]["enum"] == ["float32", "bfloat16"]
    assert training["properties"]["norm_type"]["anyOf"] == [
        {"type": "number", "minimum": 0},
        {"enum": ["inf", "-inf"]},
    ]


def test_json_schema_is_fresh_each_time():
    json_schema()["properties"].clear()
    assert json_schema()["properties"]


def test_reference_has_every_key_with_its_default():
    text = yaml_reference()
    for name, fragment in describe.sections():
        assert f"`{name}`" in text
        for key, part in describe.properties(fragment).items():
            assert f"| `{key}` | " in text or (describe.properties(part) and f"`{name}.{key}`" in text)
    assert "| `lr` | a number of at least 0 | `0.001` |" in text
    assert "| `hidden_size` | 64 | 128 | 64 |" in text
    columns = {line.count(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert columns <= {2, 3, len(PRESETS)}


def test_importing_the_configuration_imports_no_framework():
    code = "import sys, hpcli.config; print([m for m in ('torch', 'mindspore', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
