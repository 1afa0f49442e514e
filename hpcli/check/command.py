"""The check-norm command behind its options."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from hpcli.check.layouts import Layout, from_config, matrix
from hpcli.check.run import all_hold, check
from hpcli.check.verdict import Verdict
from hpcli.config.errors import ConfigError, Problem
from hpcli.config.validate import ResolvedConfig
from hpcli.faults.fault import Fault
from hpcli.faults.registry import entry_of, faults
from hpcli.report.check_table import allowed_lines, check_table, closing_lines, fault_table, verdict_json
from hpcli.report.failures import signals_end_the_run
from hpcli.report.json_lines import encode
from hpcli.report.progress_bar import ProgressBar
from hpcli.report.tables import WIDTH, plain_console

TIMEOUT_SECONDS = 60.0


def check_norm(
    resolved: ResolvedConfig | None, *, ranks: int, names: Sequence[str], device: str, inject: str | None, json: bool
) -> int:
    """Check the layouts and print the table; the exit code: 0 all hold, 1 something does not or a fault was planted.

    Raises:
        ConfigError: an unknown layout or fault, or no layout is left.
    """
    fault = _known_fault(inject) if inject else None
    layouts = _layouts(resolved, ranks, names, device, fault)
    began = time.perf_counter()
    verdicts: list[Verdict] = []
    timeout = TIMEOUT_SECONDS if resolved is None else resolved.config.launch.timeout_seconds
    with signals_end_the_run(), ProgressBar(len(layouts), json=json) as progress:
        planted = [inject] * len(layouts)
        for verdict in check(
            layouts, device=device, faults=planted, timeout_seconds=timeout, progress=progress
        ):
            verdicts.append(verdict)
            if json:
                print(encode(verdict_json(verdict)), flush=True)
    seconds = time.perf_counter() - began
    if json:
        print(encode(_summary(verdicts, ranks, seconds, inject, fault)), flush=True)
    else:
        console = plain_console(sys.stdout, WIDTH)
        console.print(check_table(verdicts))
        told = [*closing_lines(verdicts, ranks, seconds), *_injected(verdicts, inject, fault)]
        for line in [*allowed_lines(verdicts), "", *told]:
            print(line)
    return 0 if all_hold(verdicts) and fault is None else 1  # a planted fault that no check has seen is the worst failure


def list_faults(*, json: bool) -> None:
    """Print every fault that can be planted."""
    known = faults()
    if json:
        for name, fault in known.items():
            entry = entry_of(name)
            smallest = {"repro": entry.id, "condition": entry.condition, "how_we_know": entry.how_we_know, "why": entry.why}
            print(encode({"fault": name, **fault._asdict(), **smallest}))
        return
    plain_console(sys.stdout, WIDTH).print(fault_table(known))
    print(f"\n{len(known)} faults; hpcli check-norm --ranks 4 --inject FAULT plants one and must fail,")
    print("hpcli repro FAULT shows it in its smallest form")


def _layouts(
    resolved: ResolvedConfig | None, ranks: int, names: Sequence[str], device: str, fault: Fault | None
) -> list[Layout]:
    if resolved is not None:
        return [from_config(resolved)]
    known = {layout.name: layout for layout in matrix(ranks, device)}
    if not names and fault is not None:
        carrier = fault.layout.format(ranks=ranks, half=ranks // 2)
        if carrier not in known:
            raise ConfigError([Problem("--inject", None, None, "", _no_carrier(carrier, ranks))])
        names = [carrier]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError([Problem("--layout", None, None, "", _unknown(name, list(known), "layout")) for name in unknown])
    return [layout for name, layout in known.items() if not names or name in names]


def _known_fault(name: str) -> Fault:
    known = faults()
    if name not in known:
        raise ConfigError([Problem("--inject", None, None, "", _unknown(name, list(known), "fault"))])
    return known[name]


def _unknown(name: str, known: Sequence[str], kind: str) -> str:
    close = get_close_matches(name, known, 1)
    guess = f"; did you mean {close[0]}?" if close else "."
    return f"there is no {kind} {name!r}{guess} There are: {', '.join(known)}"


def _no_carrier(layout: str, ranks: int) -> str:
    return f"the layout that carries this fault, {layout}, does not exist on {ranks} ranks; 4 ranks carry every fault"


def _summary(
    verdicts: Sequence[Verdict], ranks: int, seconds: float, inject: str | None, fault: Fault | None
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "event": "summary",
        "ranks": ranks,
        "layouts": len(verdicts),
        "failed": [verdict.layout for verdict in verdicts if not verdict.holds],
        "holds": all_hold(verdicts),
        "seconds": seconds,
    }
    if fault is not None:
        summary |= {"injected": inject, "expected_cause": fault.cause, "named": _named(verdicts, fault)}
    return summary


def _named(verdicts: Sequence[Verdict], fault: Fault) -> bool:
    return any(verdict.cause is not None and verdict.cause.id == fault.cause for verdict in verdicts)


def _injected(verdicts: Sequence[Verdict], inject: str | None, fault: Fault | None) -> list[str]:
    if fault is None:
        return []
    told = "named"
    if not _named(verdicts, fault):
        carrier = fault.layout.format(ranks=4, half=2)
        told = f"NOT NAMED: not seen here; on 4 ranks, {carrier} is the layout that shows it"
    return ["", f"injected {inject} ({fault.title}; {fault.source}): {told}"]
