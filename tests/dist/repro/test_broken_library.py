"""A library with one rule reverted makes the matching repro fail: a check that cannot fail is worthless."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcli.faults.registry import entries, load_file, module_of
from hpcli.repro.command import repro
from hpcli.repro.run import Stage

with_mindspore = pytest.mark.skipif(find_spec("mindspore") is None, reason="MindSpore is not installed")
PROGRAMS = Path(__file__).parents[1] / "rank_programs"


@pytest.mark.parametrize(
    ("rule", "entry"),
    [
        ("none_to_the_default_dtype", "issue-217-torch"),
        pytest.param("none_to_the_default_dtype_in_mindspore", "issue-217", marks=with_mindspore),
        ("scalar_left_on_the_cpu", "issue-379"),
        ("coefficient_not_cast", "issue-64"),
        ("local_norm_returned", "issue-64"),
        ("local_norm_returned", "pytorch-170862"),
        ("replicated_counted_by_all", "issue-64"),
        ("replicated_counted_by_all", "veomni-184"),
        ("replicated_counted_by_all", "gitcode-178"),
    ],
)
def test_the_library_is_found_wrong(stage: Stage, monkeypatch: pytest.MonkeyPatch, rule: str, entry: str) -> None:
    known, file = entries()[entry], module_of(entries()[entry])
    monkeypatch.setattr(stage, "prepare", f"broken_rules:{rule}")
    verdict = stage.reproduce(known, file, min(known.ranks), planted=not hasattr(load_file(file), "wrong"))
    assert verdict.not_right
    assert not verdict.holds


def test_the_command_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    assert repro(["gitcode-178"], prepare="broken_rules:replicated_counted_by_all") == 1
    told = capsys.readouterr().out
    assert "the fault appears as reported; THE LIBRARY IS NOT RIGHT" in told
    assert "library: rank 0: 5.656854152679443, expected 4.47213595499958" in told
