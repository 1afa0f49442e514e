"""hpcli repro as a user types it."""

from __future__ import annotations

import json

import pytest


def test_a_fault_is_shown_beside_the_library_within_100_columns(hpcli):
    done = hpcli("repro", "megatron-7227")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.strip().startswith(("0 ", "1 "))]
    assert rows == [[rank, "40", "40", "28.2842712", "28.2842712"] for rank in "01"]
    assert lines[-1].startswith("the fault appears as reported; the library is right (")
    assert all(len(line) <= 100 for line in lines)


def test_json_has_an_event_for_each_entry_and_a_summary(hpcli):
    done = hpcli("repro", "deepspeed-8475", "average-of-norms", "--json")
    first, second, summary = map(json.loads, done.stdout.splitlines())
    assert first["id"] == second["id"] == "deepspeed-8475"  # the planted fault of the same file
    assert [entry["value"] for entry in first["wrong"]] == [pytest.approx(7.236068, rel=1e-6)] * 2
    assert [entry["value"] for entry in first["right"]] == [pytest.approx(10.954452, rel=1e-6)] * 2
    assert (first["fault_shown"], first["library_right"], first["problems"]) == (True, True, [])
    assert (summary["entries"], summary["failed"], summary["holds"]) == (2, [], True)


def test_the_entries_are_listed_within_100_columns(hpcli):
    done = hpcli("repro", "--list")
    assert done.returncode == 0
    assert "Megatron-LM#7227" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    entries = [json.loads(line) for line in hpcli("repro", "--list", "--class", "ranks", "--json").stdout.splitlines()]
    assert {entry["class"] for entry in entries} == {"ranks"}


def test_a_fault_of_ones_own_is_written_run_and_found_wrong_when_it_is(hpcli, tmp_path):
    done = hpcli("repro", "--new", "my-fault")
    assert done.returncode == 0
    assert "hpcli repro ./my_fault.py" in done.stdout
    done = hpcli("repro", "./my_fault.py")
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "my_fault.py"
    path.write_text(path.read_text().replace("wrong=7.0", "wrong=8.0"))
    done = hpcli("repro", "my_fault.py")
    assert done.returncode == 1
    assert "faulty side: rank 0: 7.0, expected 8.0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which? Give an ID, --all or --class"),
        (("megatron-7272",), "there is no entry 'megatron-7272'; did you mean megatron-7227?"),
        (("--class", "rank"), "there is no class 'rank'; did you mean ranks?"),
        (("--new", "A b"), "'A b': small letters, digits and dashes"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_one_message(hpcli, arguments, message):
    done = hpcli("repro", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert (len(done.stderr.splitlines()), done.stdout) == (1, "")
