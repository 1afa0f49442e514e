"""Files that are not what they should be: each ends in one line, soon, whatever was put in."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from hpcli.config import ConfigError, load_config, reading

NOT_SECTIONS = "a configuration has sections, such as model: {preset: decoder-tiny}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", f"x.yaml: there is nothing in this file; {NOT_SECTIONS}"),
        ("# only a comment\n", f"x.yaml: there is nothing in this file; {NOT_SECTIONS}"),
        ("null\n", f"x.yaml: there is nothing in this file; {NOT_SECTIONS}"),
        ("\n- model\n", f"x.yaml:2: the file holds a list; {NOT_SECTIONS}"),
        ("hello", f"x.yaml:1: the file holds a single value; {NOT_SECTIONS}"),
        (
            "model: {}\n---\nmodel: {}\n",
            "x.yaml:2: a second document begins here; a configuration is one document",
        ),
        (b"model: {}\n# caf\xe9\n", "x.yaml:2:6: not UTF-8 text: byte 0xe9"),
        ("model: {}".encode("utf-16"), "x.yaml: not UTF-8 text but UTF-16; save it as UTF-8"),
        (b"model: {}\nlaunch:\x00\n", "x.yaml:2:8: control character U+0000, which no text file has"),
        (b"launch: \x1b[31m\n", "x.yaml:1:9: control character U+001B, which no text file has"),
        (
            "training:\n\tsteps: 3\n",
            (
                r"x.yaml:2:1: YAML syntax error: found character '\t' that cannot start any token (while "
                r"scanning for the "
                "next token); indent with spaces, not with a tab"
            ),
        ),
        (
            "training: steps: 3\n",
            (
                "x.yaml:1:16: YAML syntax error: mapping values are not allowed here; check the "
                "indentation, or "
                "quote a value "
                "that contains ': '"
            ),
        ),
        (
            "model: {freeze: [*.weight]}\n",
            (
                "x.yaml:1:19: YAML syntax error: expected alphabetic or numeric character, but found '.' "
                "(while "
                "scanning an "
                "alias); quote a value that begins with * or &"
            ),
        ),
        (
            "training: {steps: 3\noptimizer:\n",
            (
                "x.yaml:2:10: YAML syntax error: expected ',' or '}', but got ':' (while parsing a flow "
                "mapping "
                "that begins on "
                "line 1)"
            ),
        ),
        (
            "model: *other\n",
            (
                "x.yaml:1:8: YAML syntax error: found undefined alias 'other'; quote a value that begins "
                "with * "
                "or &"
            ),
        ),
        (
            "? [model]\n: {}\n",
            "x.yaml:1: a list or a mapping stands where a key should be; keys are plain words",
        ),
        (
            "? {a: b}\n: {}\n",
            "x.yaml:1: a list or a mapping stands where a key should be; keys are plain words",
        ),
        ("model: &m\n  <<: *m\n", "x.yaml:2: model: merge keys (<<) are not supported; write the keys out"),
        ("model: &m {freeze: [*m]}\n", "x.yaml:1: model.freeze[0] contains itself through an alias"),
        ("a: " + "[" * 1000, "x.yaml:1: nested more than 20 levels deep"),
        ("? " * 20_000, "x.yaml:1: nested more than 20 levels deep"),
        ("- " * 20_000, "x.yaml:1: nested more than 20 levels deep"),
        ("#" * 200_000, "x.yaml: larger than 128 KiB, which no configuration is"),
        ("a: 1\n" * 20_000, "x.yaml:5000: more than 5000 values, counting what aliases repeat"),
        (
            "%YAML 3.0\n---\nmodel: {}\n",
            "x.yaml:1:1: YAML syntax error: found incompatible YAML document (version 1.* is required)",
        ),
    ],
)
def test_bad_text_ends_in_one_line(problem, text, expected):
    began = time.monotonic()
    assert problem(text) == expected
    assert time.monotonic() - began < 5


def test_billion_laughs_is_counted_and_stopped(problem):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    assert problem("\n".join(lines)).endswith("more than 5000 values, counting what aliases repeat")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!int", "!mine", "!"])
def test_tags_are_refused(problems, tag):
    lines = problems(f"training:\n  steps: {tag} 3\n", ranks=1)
    assert f"x.yaml:2: the tag {tag} is not supported; write the plain value" in lines


@pytest.mark.parametrize(
    "text", ['a: "\\UFFFFFFFF"', "%YAML 99999999999999999999.1\n---\na: b", 'a: "\\ud800"', "{[a, b]: 1}"]
)
def test_what_the_parser_itself_stumbles_over_is_reported(problems, text):
    assert all(line.startswith("x.yaml") for line in problems(text))


def test_an_alias_may_repeat_a_value(load):
    loaded = load(
        "training: {steps: &n 7, warmup_steps: 0}\noptimizer: {warmup_steps: *n}\n".replace(
            ", warmup_steps: 0", ""
        )
    )
    assert (loaded.config.training.steps, loaded.config.optimizer.warmup_steps) == (7, 7)


def test_byte_order_mark_and_windows_line_ends_are_fine(load):
    assert load(b"\xef\xbb\xbftraining:\r\n  steps: 3\r\n").config.training.steps == 3


def message(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_missing_file_names_its_neighbour():
    Path("fsdp8.yaml").write_text("{}")
    assert message("fdsp8.yaml") == "fdsp8.yaml: there is no such file; did you mean fsdp8.yaml?"
    assert message("quite/another") == "quite/another: there is no such file"


def test_directory_is_not_a_file():
    Path("d.yaml").mkdir()
    assert message("d.yaml") == "d.yaml: this is a directory, not a configuration file"


def test_file_as_directory_is_one_line():
    Path("f").write_text("")
    assert message("f/x.yaml") == "f/x.yaml: this file cannot be read: Not a directory"


def test_unreadable_file_is_one_line(monkeypatch):
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    Path("x.yaml").write_text("{}")
    monkeypatch.setattr(os, "open", refuse)
    assert message("x.yaml") == "x.yaml: this file may not be read; check its permissions"


def test_a_pipe_without_a_writer_does_not_hang(monkeypatch):
    os.mkfifo("x.yaml")
    monkeypatch.setattr(reading, "PIPE_SECONDS", 0.1)
    assert "a named pipe into which nothing was written for 0.1 s" in message("x.yaml")


def test_a_pipe_is_read_when_its_writer_is_slow():
    os.mkfifo("x.yaml")
    text = "training: {steps: 7}\n"
    writer = threading.Timer(0.2, lambda: Path("x.yaml").write_text(text))
    writer.start()
    assert load_config(Path("x.yaml")).config.training.steps == 7
    writer.join()


def test_odd_names_stay_on_one_line():
    assert message("a\nb\udcff.yaml") == "a\\nb\\udcff.yaml: there is no such file"
    assert message("a\0b").startswith("a\\x00b: this file cannot be read: ")
