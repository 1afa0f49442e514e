"""hpcli check-norm as a user types it."""

from __future__ import annotations

import json

import pytest


def test_a_layout_that_holds_is_shown_in_a_table_of_at_most_100_columns(hpcli):
    done = hpcli("check-norm", "--ranks", "2", "--layout", "fsdp2")
    assert done.returncode == 0, done.stderr
    assert "1 layout on 2 ranks: all hold" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_json_has_an_event_for_each_layout_and_a_summary(hpcli, good):
    done = hpcli("check-norm", good, "--json")
    layout, summary = map(json.loads, done.stdout.splitlines())
    assert (layout["layout"], layout["holds"], layout["ranks_equal"], layout["collectives_per_clip"]) == ("good", True, True, 1)
    assert layout["relative_difference"] < 1e-6
    assert (summary["holds"], summary["ranks"], summary["failed"]) == (True, 4, [])
    assert done.returncode == 0


def test_a_planted_fault_fails_and_is_named(hpcli):
    done = hpcli("check-norm", "--ranks", "2", "--inject", "average-of-norms")
    assert done.returncode == 1
    assert "cause: the norm is the average of the ranks' norms" in done.stdout
    assert done.stdout.rstrip().endswith("(the ranks' norms averaged; DeepSpeed#8475): named")


def test_a_planted_fault_that_the_layout_cannot_show_fails_too(hpcli):
    done = hpcli("check-norm", "--ranks", "2", "--layout", "fsdp2", "--inject", "tied-counted-twice")
    assert done.returncode == 1
    assert "1 layout on 2 ranks: all hold" in done.stdout
    assert done.stdout.rstrip().endswith("NOT NAMED: not seen here; on 4 ranks, pp2-fsdp2-tied is the layout that shows it")


def test_the_faults_are_listed(hpcli):
    done = hpcli("check-norm", "--list-faults", "--json")
    known = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert len(known) >= 15
    assert all(entry["rule"] and entry["repro"] and entry["how_we_know"] and entry["why"] for entry in known)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "how many ranks? Give --ranks N, or a CONFIG"),
        (("--ranks", "0"), "0: from 1 to 64"),
        (("--ranks", "2", "--layout", "fspd2"), "there is no layout 'fspd2'; did you mean fsdp2?"),
        (("--ranks", "2", "--layout", "nosuch", "--inject", "average-of-norms"), "there is no layout 'nosuch'. There are: fsdp2"),
        (("--ranks", "2", "--inject", "average-of-norm"), "did you mean average-of-norms?"),
        (("--ranks", "2", "--inject", "expert-half-dropped"), "does not exist on 2 ranks; 4 ranks carry every fault"),
        (("--ranks", "2", "--platform", "jax"), "'jax' is not available in this version"),
        (("--ranks", "2", "--device", "tpu"), "'tpu': one of auto, cpu"),
        (("--ranks", "2", "--device", "cuda"), "cuda: there is no such device on this machine"),
        (("--ranks", "2", "--device", "npu"), "npu: there is no such device on this machine"),
        (("--ranks", "17", "--layout", "nosuch"), "there is no layout 'nosuch'. There are: fsdp17, ddp17"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_one_message(hpcli, arguments, message):
    done = hpcli("check-norm", *arguments, env={"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
