"""check-norm on real ranks: what is right passes, and every planted fault is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcli.check.layouts import matrix
from hpcli.check.run import check
from hpcli.faults.registry import faults


@pytest.mark.parametrize(
    ("ranks", "device"),
    [
        (3, "cpu"),
        (4, "sim-npu"),
        pytest.param(4, "cpu", marks=pytest.mark.long),
        *(pytest.param(ranks, device, marks=pytest.mark.long) for ranks in (8, 16) for device in ("cpu", "sim-npu")),
    ],
)
def test_every_layout_holds(ranks, device):
    verdicts = list(check(matrix(ranks, device), device=device))
    assert [(verdict.layout, verdict.problems) for verdict in verdicts if not verdict.holds] == []
    assert all(verdict.collectives == 1 and verdict.equal for verdict in verdicts)


def test_every_fault_is_found_and_named():
    layouts = {layout.name: layout for layout in matrix(4)}
    known = faults()
    carriers = [layouts[fault.layout.format(ranks=4, half=2)] for fault in known.values()]
    verdicts = list(check(carriers, faults=list(known)))
    named = {name: verdict.cause and verdict.cause.id for name, verdict in zip(known, verdicts, strict=True)}
    assert named == {name: fault.cause for name, fault in known.items()}
    assert not any(verdict.holds for verdict in verdicts)


def test_swapping_two_patches_swaps_the_diagnoses():
    layout = next(layout for layout in matrix(2) if layout.name == "fsdp2")
    one, other = "average-of-norms", "loss-scale-left-in"
    assert faults()[one].layout == faults()[other].layout
    verdicts = list(check([layout, layout], faults=[other, one]))
    assert [verdict.cause and verdict.cause.id for verdict in verdicts] == [faults()[other].cause, faults()[one].cause]


def test_what_fails_in_one_layout_leaves_the_others_alone():
    layouts = {layout.name: layout for layout in matrix(2)}
    config = layouts["tp2"].resolved.config
    model = config.model.model_copy(update={"hidden_size": 30})  # as if the validator had let it through
    impossible = replace(layouts["tp2"].resolved, config=config.model_copy(update={"model": model}))
    three = [layouts["fsdp2"], layouts["tp2"]._replace(resolved=impossible), layouts["fsdp2"], layouts["fsdp2"]]
    verdicts = list(check(three, faults=[None, None, "no-such-fault"]))
    assert [verdict.holds for verdict in verdicts] == [True, False, False, True]
    assert "no reference: " in verdicts[1].problems[0]
    assert "ModuleNotFoundError" in verdicts[2].problems[0]
