"""Whatever is done to a valid configuration, it resolves or ends in clean lines."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcli.config import ConfigError, ResolvedConfig, describe, load_config, resolve_config

EXAMPLES = int(os.environ.get("HP_EXAMPLES", "800"))
PROFILE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)

VALID: dict[str, Any] = {
    "platform": "torch",
    "device": "cpu",
    "model": {"preset": "decoder-tiny", "num_layers": 2, "freeze": ["layers.0.*"]},
    "data": {"source": "builtin", "shuffle": True},
    "training": {
        "steps": 3,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "seq_length": 16,
        "max_norm": 1.0,
    },
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]},
    "parallelism": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "fsdp_config": {"enable_offload": False, "unit": "auto"},
    "launch": {"timeout_seconds": 60.0},
}
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
VALID_TEXT = yaml.safe_dump(VALID, sort_keys=False)
SCRAPS = [
    "on", "no", "1e-5", ".inf", ".nan", "-1", "0", "3.0", "10_000", "3,000", "010", "''", '"3"', "null", "~",
    "[", "]", "{", "}", "[]", "{}", "- x", "? a", ": ", "&a ", "*a", "!!int 3", "!x", "<<: {}", "---", "...",
    "\t", "|\n  x", ">", "#", '"\\', '"\\ud800"', '"\\0"', "%YAML 1.2", "@", "`", "a: b: c", "1" * 400, "é",
    "\u2028", "inf", "-inf", "fp16", "moe-tiny", "mindspore", "zbv", "-2", "2", "64", "999999999999999999999",
    "true", "model:", "training:", "  steps: 1",
]  # fmt: skip
KEYS = [key for _, fragment in describe.sections() for key in describe.properties(fragment)]
DOTTED = [f"{name}.{key}" for name, fragment in describe.sections() for key in describe.properties(fragment)]


def any_value(chance: random.Random) -> Any:
    return chance.choice(
        [
            lambda: None,
            lambda: chance.random() < 0.5,
            lambda: chance.randint(-2, 9),
            lambda: chance.randint(-(2**70), 2**70),
            lambda: chance.choice([0.0, 2.0, -0.5, 1e-30, 1e300, float("inf"), float("nan")]),
            lambda: chance.choice(SCRAPS),
            lambda: [any_value(chance) for _ in range(chance.randint(0, 3))],
            lambda: {chance.choice(KEYS): any_value(chance)},
        ]
    )()


def change_values(chance: random.Random) -> str:
    """A valid configuration with keys deleted, renamed, moved and retyped, as YAML."""
    value = {key: dict(part) if isinstance(part, dict) else part for key, part in VALID.items()}
    for _ in range(chance.randint(1, 4)):
        section: dict[Any, Any] = chance.choice(
            [value, *(part for part in value.values() if isinstance(part, dict))]
        )
        key = chance.choice(list(section) or ["x"])
        match chance.randrange(5):
            case 0:
                section.pop(key, None)
            case 1:
                section[chance.choice([*KEYS, chance.choice(SCRAPS)])] = section.pop(key, None)
            case 2:
                section[chance.choice(KEYS)] = any_value(chance)
            case 3:
                section[f"{key}{chance.choice('z_s-')}"] = section.get(key)
            case _:
                section[key] = any_value(chance)
    return (
        json.dumps(value, indent=chance.choice([None, 1]))
        if chance.random() < 0.5
        else yaml.dump(value, Dumper=DUMPER)
    )


def change_text(chance: random.Random) -> bytes:
    """A configuration's text with lines repeated, deleted, indented, spliced with scraps and random bytes."""
    lines = (VALID_TEXT if chance.random() < 0.7 else change_values(chance)).splitlines(keepends=True) or [""]
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(lines))
        line = lines[at]
        column = chance.randrange(len(line) + 1)
        lines[at] = chance.choice(
            [
                line + line,
                "",
                " " + line,
                line.lstrip(),
                line[:column] + chance.choice(SCRAPS) + line[column:],
                line.split(":")[0] + ": " + chance.choice(SCRAPS) + "\n",
                chance.choice(SCRAPS) + "\n" + line,
                line[:column],
            ]
        )
    data = "".join(lines).encode("utf-8", "surrogatepass")
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.choice([0, 0, 0, 1, 4])) + data[at:]


def any_override(chance: random.Random) -> str:
    return chance.choice(DOTTED) + chance.choice(["=", "=", "=", ".x=", ""]) + chance.choice(SCRAPS)


STARTS = re.compile(r"x\.yaml(:\d+){0,2}: .|--set .*: .|--ranks -?\d+: .")


def check(data: bytes, overrides: list[str], ranks: int | None) -> None:
    Path("x.yaml").write_bytes(data)
    try:
        resolved = resolve_config(load_config("x.yaml", overrides), ranks=ranks)
    except ConfigError as error:
        text = str(error)
        assert text
        assert "Traceback" not in text
        assert len(text) < 200 * 500
        for line in text.splitlines():
            assert STARTS.match(line), line
        assert len(text.split("\n")) == len(text.splitlines())
        text.encode()
        return
    assert isinstance(resolved, ResolvedConfig)
    assert resolved.world_size == resolved.mesh.world_size
    assert type(resolved.config).model_validate_json(resolved.config.model_dump_json()) == resolved.config


@PROFILE
@given(seed=st.integers(0, 2**63))
def test_changed_values_resolve_or_end_in_clean_lines(seed):
    chance = random.Random(seed)
    overrides = [any_override(chance) for _ in range(chance.randrange(3))]
    check(
        change_values(chance).encode("utf-8", "surrogatepass"),
        overrides,
        chance.choice([None, None, *range(-1, 10)]),
    )


@PROFILE
@given(seed=st.integers(0, 2**63))
def test_changed_text_resolves_or_ends_in_clean_lines(seed):
    check(change_text(random.Random(seed)), [], 4)


@PROFILE
@given(
    data=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)),
    override=st.text(max_size=12),
)
def test_any_bytes_and_any_override_resolve_or_end_in_clean_lines(data, override):
    check(data, [], None)
    check(b"{}", [override], None)


def test_the_configuration_that_is_changed_is_itself_valid():
    Path("x.yaml").write_text(VALID_TEXT)
    assert resolve_config(load_config("x.yaml"), ranks=None).world_size == 4
