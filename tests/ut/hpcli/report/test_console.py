from __future__ import annotations

import io
import math
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest

from hpcli.report.console import ConsoleReport, round_step
from hpcli.report.verdict import norm_verdict


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def report(events: list[dict[str, Any]], stream: Any = None, seconds: float = 0.1) -> str:
    stream = stream or io.StringIO()
    clock = Clock()
    console = ConsoleReport(stream, clock)
    for event in events:
        clock.now += seconds
        if event["event"] == "norm_table":
            agree, verdict = norm_verdict(event["rows"])
            event = {**event, "agree": agree, "verdict": verdict}
        console.handle(event)
    console.close()
    return stream.getvalue()


def step_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step (\d+)/", text, re.MULTILINE)]


def test_a_pipe_gets_plain_lines(events: SimpleNamespace) -> None:
    text = report(events.whole_run())
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "step 1/4  loss 5.5000  norm 0.776062  clip 1.000  12,345 tokens/s  0:00 left\n" in text
    assert "8 of 8 ranks hold 0.776062, bit for bit\n" in text
    assert "done: 4 steps in 1:02, loss 5.5000 -> 1.3750\n" in text
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"])
def test_a_pipe_gets_plain_lines_even_where_colour_is_forced(
    events: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert "\x1b" not in report(events.whole_run())


def test_the_header_says_what_runs_where(events: SimpleNamespace) -> None:
    text = report([events.start()])
    for part in (
        "training examples/configs/fsdp8.yaml",
        "decoder-small, 1,054,464 parameters",
        "dp_shard 8 = 8 ranks on vm",
        "params float32, compute bfloat16, reduce float32",
        "cpu (torch 2.13.0)",
        "4 steps, 4,096 tokens a step",
        "runs/fsdp8",
        "[bold]not markup[/bold]",
    ):
        assert part in text


def test_a_bare_start_event_is_enough() -> None:
    assert report([{"event": "start"}]).startswith("training\n")


def test_a_long_run_is_thinned_but_keeps_first_last_and_table_steps(events: SimpleNamespace) -> None:
    run = [events.start(steps=1000)]
    for step in range(1, 1001):
        run.append(events.step(step))
        if step == 333:
            run.append(events.table(step, events.rows(8)))
    numbers = step_numbers(report(run, seconds=0.01))
    assert 20 < len(numbers) < 60
    assert {1, 333, 1000} < set(numbers)
    assert len(numbers) == len(set(numbers))


def test_a_table_before_its_step_keeps_the_step_too(events: SimpleNamespace) -> None:
    run = [events.start(steps=1000), events.step(1), events.table(2, events.rows(2)), events.step(2)]
    assert step_numbers(report(run, seconds=0.01)) == [1, 2]


def test_slow_steps_are_all_shown(events: SimpleNamespace) -> None:
    run = [events.start(steps=1000), *(events.step(step) for step in range(1, 6))]
    assert step_numbers(report(run, seconds=20)) == [1, 2, 3, 4, 5]


def test_time_left_is_the_mean_of_the_latest_steps(events: SimpleNamespace) -> None:
    run = [events.start(steps=100), *(events.step(step) for step in range(1, 11))]
    assert "step 10/100" in (text := report(run, seconds=2)) and "3:00 left" in text


def test_a_skipped_step_is_said_loudly(events: SimpleNamespace) -> None:
    step = events.step(2, skipped=True, skip_reason="the gradient norm is inf", grad_norm=math.inf)
    text = report([events.start(), events.step(1), step])
    assert "SKIPPED step 2: the gradient norm is inf; the parameters are unchanged\n" in text


def test_a_run_that_skips_every_step_does_not_flood(events: SimpleNamespace) -> None:
    steps = [events.step(step, skipped=True, grad_norm=math.nan) for step in range(1, 1001)]
    text = report([events.start(steps=1000), *steps, events.end(1000)], seconds=0.01)
    assert text.count("SKIPPED step") < 120
    assert "skipped: 1,000 steps with a gradient norm that was not finite" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 1e300])
def test_no_value_breaks_the_line(events: SimpleNamespace, value: float | None) -> None:
    step = events.step(1, loss=value, grad_norm=value, clip_coefficient=value, tokens_per_second=value)
    end = {**events.end(), "first_loss": value, "last_loss": value, "seconds": value}
    assert "step 1/4" in report([events.start(), step, end])


def test_a_disagreement_is_a_word_and_not_a_colour(events: SimpleNamespace) -> None:
    text = report([events.start(), events.table(1, events.rows(4, odd={3: 0.5}))])
    assert "DISAGREE: ranks 0-2 hold 0.776062" in text


def test_a_terminal_gets_a_live_line_and_its_cursor_back(
    events: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = report(events.whole_run(), Terminal())
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "step 4/4" in text


def test_a_terminal_shows_that_the_ranks_are_starting_and_a_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream in (Terminal(), io.StringIO()):
        console = ConsoleReport(stream)
        console.wait()
        console.close()
        assert ("starting the ranks" in stream.getvalue()) == stream.isatty()


def test_a_run_that_breaks_off_gives_the_cursor_back(
    events: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = report([events.start(), events.step(1)], Terminal())
    assert text.rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_dumb_terminal_gets_plain_lines(
    events: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    assert "\x1b" not in report(events.whole_run(), Terminal())


def test_no_color_is_honoured(events: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    text = report([events.start(), events.table(1, events.rows(4, odd={3: 0.5}))], Terminal())
    assert not re.search(r"\x1b\[(3[0-7]|38|9[0-7])", text)


@pytest.mark.parametrize("columns", ["10", "25", "40", "79", "200", "nonsense"])
def test_any_width_works(events: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "step 4/4" in report(events.whole_run())
    monkeypatch.setenv("TERM", "xterm")
    text = report(events.whole_run(), Terminal())
    if columns.isdigit() and int(columns) >= 25:
        status_lines = re.findall(r"[^\r\n]*step 4/4[^\r\n]*", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
        assert status_lines and all(len(line) <= int(columns) for line in status_lines)


def test_a_closed_pipe_is_left_to_the_caller(events: SimpleNamespace) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:
        with pytest.raises(BrokenPipeError):
            report([events.start()], stream)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_step_intervals_are_round_numbers() -> None:
    assert [round_step(wanted) for wanted in (0, 0.4, 1, 1.1, 3, 6, 11, 25, 51, 2500)] == [
        1, 1, 1, 2, 5, 10, 20, 50, 100, 5000,
    ]  # fmt: skip
