"""The catalogue as a regression test: every fault appears as reported, and the library is right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hpcli.faults.entry import Entry
from hpcli.faults.registry import entries, load_file, module_of
from hpcli.repro.command import repro
from hpcli.repro.run import Stage, missing
from hpcli.repro.verdict import Verdict

FAST_SECONDS = 3.0


def marked(entry: Entry) -> object:
    slow = entry.seconds > FAST_SECONDS
    marks = [pytest.mark.long] if slow else []
    if remedy := missing(entry):
        marks.append(pytest.mark.skip(reason=remedy))
    return pytest.param(entry, id=entry.id, marks=marks)


def reproduced(stage: Stage, entry: Entry, ranks: int | None = None) -> Verdict:
    file = module_of(entry)
    planted = not hasattr(load_file(file), "wrong")
    return stage.reproduce(entry, file, ranks or entry.ranks[0], planted=planted)


@pytest.mark.parametrize("entry", [marked(entry) for entry in entries().values()])
def test_the_fault_appears_as_reported_and_the_library_is_right(stage: Stage, entry: Entry) -> None:
    verdict = reproduced(stage, entry)
    assert (verdict.not_shown, verdict.not_right) == ((), ())


OTHERS = [
    pytest.param(entry, ranks, id=f"{entry.id}-{ranks}", marks=[pytest.mark.skip(reason=remedy)] if (remedy := missing(entry)) else [])
    for entry in entries().values()
    for ranks in entry.ranks[1:]
]


@pytest.mark.parametrize(("entry", "ranks"), OTHERS)
def test_the_large_ones_do_on_fewer_ranks_too(stage: Stage, entry: Entry, ranks: int) -> None:
    verdict = reproduced(stage, entry, ranks)
    assert (verdict.not_shown, verdict.not_right) == ((), ())


PLANTED = """
from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="mine", title="norms added up", kind="ranks", source="mine#1", condition="3 and 4", shown_by="planted",
    wrong=7.0, right=5.0, how_we_know="sqrt(9 + 16) = 5", why="One. Two. Three.", ranks=(2,), device="DEVICE",
)


def right():
    import torch.distributed as dist

    from hpcli.faults.parameters import ranks_mesh, with_local_gradient
    from hyper_parallel import clip_grad_norm_

    return clip_grad_norm_([with_local_gradient([3.0 + dist.get_rank()], ranks_mesh(), "S0")], 1.0).item()


def patch():
    from hpcli.faults.fault import replace
    from hyper_parallel.core import norm_exchange

    replace(norm_exchange, "combine", lambda norms, p: sum(norms))
"""


def test_a_file_of_ones_own_may_put_a_faulty_rule_back(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLANTED.replace("DEVICE", "cpu"))
    verdict = stage.reproduce(load_file(path).ENTRY, str(path), 2, planted=True)
    assert [outcome["value"] for outcome in verdict.wrong] == [7.0, 7.0]
    assert verdict.holds


def test_what_cannot_be_started_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(PLANTED.replace("DEVICE", "cpu"))
    bad.write_text(PLANTED.replace("DEVICE", "npu"))
    if importlib.util.find_spec("torch_npu"):
        pytest.skip("torch_npu is installed")
    assert repro([str(bad), str(good)], json=True) == 1
    failed, held, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert (held["fault_shown"], held["library_right"]) == (True, True)
    assert (failed["fault_shown"], failed["library_right"]) == (False, False)
    assert "torch_npu" in failed["problems"][0]
    assert summary["failed"] == ["mine"]
