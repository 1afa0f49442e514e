"""The table of check-norm and what is said below it."""

from __future__ import annotations

import io
import math

from hpcli.check.causes import Cause
from hpcli.check.verdict import Verdict, failed
from hpcli.faults.registry import faults
from hpcli.report.check_table import check_table, closing_lines, fault_table
from hpcli.report.tables import WIDTH, plain_console

GOOD = Verdict("fsdp8", 2.5, 3e-8, True, ("norm.weight", 1e-7), 1, 0.5, (), None)
LONG = Verdict(
    "fsdp16-bf16-native-reduce", 123456.75, 1e-5, False, ("text.layers.10.attention.query.weight", 1e-3), 1, 100.25,
    ("ranks hold different norms",), Cause("ranks-disagree", "1, 2"),
)


def rendered(table) -> list[str]:
    out = io.StringIO()
    plain_console(out, WIDTH).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_nothing_but_parameters_is_shortened():
    lines = rendered(check_table([GOOD, LONG, failed("tp2", "rank 1 failed", 1.0)]))
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    good, long, died = lines[-3:]
    assert good.split() == ["fsdp8", "2.5", "3e-08", "yes", "norm.weight", "1e-07", "1", "0.5s", "ok"]
    assert long.split()[:4] == ["fsdp16-bf16-native-reduce", "123456.8", "1e-05", "NO"]
    assert long.split()[4].startswith("..") and "text.layers.10.attention.query.weight".endswith(long.split()[4][2:])
    assert long.endswith("100.2s FAILED")
    assert died.endswith("FAILED")


def test_a_failure_is_told_with_its_cause_and_a_dead_rank_once():
    lines = closing_lines([GOOD, LONG, failed("tp2", "rank 1 failed", 1.0)], 16, 60.0)
    assert lines[0] == "2 of 3 layouts on 16 ranks failed, in 60.0 s"
    assert "  cause: ranks hold different norms in a way that fits no known cause (1, 2)" in lines
    assert [line for line in lines if "rank 1 failed" in line] == ["  - rank 1 failed"]
    assert lines[-1] == "  cause: a rank failed"


def test_what_may_differ_is_told_below():
    lines = closing_lines([GOOD._replace(notes=("offload changes bits",))], 8, 1.0)
    assert lines == ["1 layout on 8 ranks: all hold, in 1.0 s", "fsdp8: offload changes bits"]
    assert math.isnan(failed("tp2", "", 0.0).norm)


def test_every_fault_fits_on_a_line_of_the_list():
    lines = rendered(fault_table(faults()))
    assert max(map(len, lines)) <= 100
    assert all(any(name in line for line in lines) for name in faults())
