"""`--set KEY=VALUE` follows the rules of the file, and is named in messages as it was typed."""

from __future__ import annotations

import pytest

from hpcli.config import Override
from hpcli.config.errors import ConfigError
from hpcli.config.load import load_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training.steps=0",
            "training.steps: 0 is out of range; allowed: a whole number from 1 to 1000000000000",
        ),
        ("training.stepz=3", "training.stepz: unknown key; did you mean 'steps'?"),
        ("steps=3", "steps: unknown key; it belongs under training"),
        (
            "training.steps.x=3",
            "training.steps: is a value, not a section; allowed: a whole number from 1 to 1000000000000",
        ),
        ("training.deterministic=on", "training.deterministic: on is not a boolean; write true or false"),
        ("training.steps", "expected KEY=VALUE, such as training.steps=10"),
        ("=3", "expected KEY=VALUE, such as training.steps=10"),
        ("training.=3", "expected KEY=VALUE, such as training.steps=10"),
        ("", "expected KEY=VALUE, such as training.steps=10"),
        (
            "optimizer.betas=[0.9, 2]",
            "optimizer.betas[1]: 2 is out of range; allowed: a number of at least 0 and below 1",
        ),
        (
            "model={preset: decoder-tiny, preset: x}",
            "model.preset: duplicate key; it is already given before",
        ),
        ("data.path=!!str x", "the tag !!str is not supported; write the plain value"),
    ],
)
def test_bad_override_is_reported_as_typed(problem, text, expected):
    assert problem("{}", text) == f"--set {text}: {expected}"


def test_syntax_errors_have_no_line_in_an_option(problem):
    line = problem("{}", "model.freeze=[a")
    assert line.startswith(
        "--set model.freeze=[a: YAML syntax error: expected ',' or ']', but got '<stream end>'"
    )


def test_override_wins_over_the_file_and_the_last_over_the_first(load):
    loaded = load(
        "training: {steps: 3, seed: 5}", "training.steps=4", "training.steps=1_0", "training.steps=6"
    )
    assert loaded.config.training.steps == 6
    assert loaded.config.training.seed == 5


def test_override_mends_a_wrong_value_of_the_file(load):
    assert load("training: {steps: many}", "training.steps=6").config.training.steps == 6


def test_override_of_a_section_replaces_it(load):
    loaded = load("model: {num_layers: 3}", "model={preset: decoder-small}")
    assert (loaded.config.model.preset, loaded.config.model.num_layers) == ("decoder-small", None)
    assert not loaded.is_set("model.num_layers")


def test_override_reaches_into_an_empty_or_absent_section(load):
    config = load("training:\n", "training.steps=2", "optimizer.lr=1e-5").config
    assert (config.training.steps, config.optimizer.lr) == (2, 1e-5)


def test_override_without_value_gives_back_the_default(load):
    assert load("launch: {ranks: 3}", "launch.ranks=").config.launch.ranks is None


def test_wrong_section_in_the_file_is_reported_despite_an_override(problem):
    line = problem("training: 5\n", "training.steps=2")
    assert line.startswith("x.yaml:1: training: 5 is not a section;")


def test_options_with_names_of_their_own_are_reported_by_them(problem):
    override = Override("training.steps=0", label="--steps 0")
    assert problem("{}", override).startswith("--steps 0: training.steps: 0 is out of range")


def test_override_below_a_value_is_refused_even_where_the_file_sets_that_value(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("training: {steps: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["training.steps.x=4"])
    assert "training.steps.x: unknown key" in str(caught.value)
