"""The catalogue as such: what every entry must say, and that it is found by being there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcli
import hyper_parallel
from hpcli.config.errors import ConfigError
from hpcli.faults.entry import CLASSES, SHOWN_BY, Entry, expectations
from hpcli.faults.registry import FOLDER, entries, entry_of, fault_of, faults, load_file, module_of
from hpcli.repro.command import repro
from hpcli.repro.skeleton import SKELETON, write_skeleton

EVERY = list(entries().values())


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry.id)
def test_an_entry_says_what_it_must(entry: Entry) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", entry.id)
    assert entry.kind in CLASSES and entry.shown_by in SHOWN_BY
    assert entry.title and entry.source and entry.condition and entry.how_we_know
    assert len(re.findall(r"[.?!](?= |$)", entry.why)) == 3, "why is three sentences"
    for ranks in entry.ranks:
        wrong, right = expectations(entry.wrong, ranks), expectations(entry.right, ranks)
        assert len(wrong) == len(right) == ranks
        assert list(wrong) != list(right)


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry.id)
def test_the_faulty_side_is_what_the_entry_says_that_it_is(entry: Entry) -> None:
    module = load_file(module_of(entry))
    assert hasattr(module, "wrong") != (entry.shown_by == "planted" and hasattr(module, "patch"))
    assert callable(module.right)
    assert (fault_of(entry) in faults()) == hasattr(module, "FAULT")


def test_every_fault_that_can_be_planted_has_an_entry_that_shows_it_alone() -> None:
    for name, fault in faults().items():
        assert fault_of(entry_of(name)) == name
        assert fault.rule and fault.layout and fault.cause


def test_reading_the_catalogue_imports_no_framework() -> None:
    script = "import sys; from hpcli.faults.registry import entries, faults; entries(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_what_cannot_be_chosen_is_refused() -> None:
    for arguments, message in (
        ({"names": []}, "which? Give an ID"),
        ({"names": ["megatron-7227"], "every": True}, "which? Give an ID"),
        ({"names": ["megatron-7272"]}, "there is no entry 'megatron-7272'; did you mean megatron-7227?"),
        ({"names": ["tied-counted-twise"]}, "did you mean tied-counted-twice?"),
        ({"names": [], "kind": "ofload"}, "there is no class 'ofload'; did you mean offload?"),
        ({"names": ["megatron-7227"], "ranks": 3}, "megatron-7227 is shown on 2 ranks, not on 3"),
        ({"names": ["no_such.py"]}, "there is no such file; hpcli repro --new no-such writes one"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            repro(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("from __future__", "1 / 0\nfrom __future__"), "cannot be used as an entry: "),
        (("ENTRY =", "OTHER ="), "has no attribute 'ENTRY'"),
        (("def right", "def other"), "has no attribute 'right'"),
        (("def wrong", "def other"), "it needs right(), and wrong() or patch()"),
        (('kind="ranks"', 'kind="rank"'), "kind='rank': one of ranks, dtensor"),
        (('shown_by="formula"', 'shown_by=""'), "shown_by='': one of planted"),
    ],
)
def test_a_file_of_ones_own_that_is_no_entry_is_refused(tmp_path, change, message) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SKELETON.format(id="mine").replace(*change))
    with pytest.raises(ConfigError, match=re.escape(message)):
        repro([str(path)])


def test_the_skeleton_is_an_entry(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_skeleton("my-fault")
    module = load_file(path)
    assert module.ENTRY.id == "my-fault"
    test_an_entry_says_what_it_must(module.ENTRY)
    for name in ("my-fault", "megatron-7227", "My Fault", "../x"):
        with pytest.raises(ConfigError):
            write_skeleton(name)
    assert not (FOLDER / "my_fault.py").exists()


@pytest.mark.parametrize(
    "text",
    [
        "output_buffer dtype mismatch: expected BFloat16, got Float32",
        "No backend type associated with device type cpu",
        "result type Float can't be cast to the desired output type Half",
    ],
)
def test_the_texts_of_the_reports_stand_nowhere_but_as_expectations(text: str) -> None:
    packages = [Path(package.__file__).parent for package in (hpcli, hyper_parallel)]
    holders = [path for package in packages for path in package.rglob("*.py") if text in path.read_text()]
    assert holders and all(path.parent == FOLDER for path in holders)
