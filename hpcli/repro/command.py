"""The repro command behind its options."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rich.table import Table

from hpcli.config.errors import ConfigError, Problem
from hpcli.faults.entry import CLASSES, SHOWN_BY, Entry
from hpcli.faults.registry import FOLDER, entries, entry_of, fault_of, faults, load_file, module_of
from hpcli.launch.errors import LaunchError
from hpcli.launch.output import print_line
from hpcli.report.failures import signals_end_the_run
from hpcli.report.formats import count_text
from hpcli.report.json_lines import encode
from hpcli.report.progress_bar import ProgressBar
from hpcli.report.repro_table import (
    conclusion_lines,
    entry_json,
    entry_table,
    summary_table,
    verdict_json,
    verdict_lines,
)
from hpcli.report.tables import WIDTH, plain_console
from hpcli.repro.run import Stage, missing
from hpcli.repro.skeleton import write_skeleton
from hpcli.repro.verdict import Verdict, not_started


class Chosen(NamedTuple):
    """An entry that is to be re-enacted. ``planted``: its faulty side is a reverted rule of the library."""

    entry: Entry
    file: str
    ranks: int
    planted: bool


def repro(
    names: Sequence[str],
    *,
    every: bool = False,
    kind: str | None = None,
    ranks: int | None = None,
    json: bool = False,
    debug: bool = False,
    prepare: str | None = None,
) -> int:
    """Re-enact faults and show them; the exit code: 0 each appears and the library is right, 1 one does not or it is not.

    Args:
        names: ids, or files of one's own.
        prepare: "package.module:function" that every rank calls first; a test breaks the library with it.

    Raises:
        ConfigError: an unknown id or class, nothing chosen, or a number of ranks that does not show the fault.
        LaunchError: a named entry needs what is not installed (of a class or all, such are left out, and said to be), or the only
            one cannot be started (of several, that one fails).
    """
    chosen = _chosen(names, every, kind, ranks)
    left_out = {one.entry.id: remedy for one in chosen if (remedy := missing(one.entry))}
    if names and left_out:
        name, remedy = next(iter(left_out.items()))
        raise LaunchError(f"{name} cannot run here: {remedy}")
    chosen = [one for one in chosen if one.entry.id not in left_out]
    began = time.perf_counter()
    verdicts: list[Verdict] = []
    with (
        signals_end_the_run(),
        ProgressBar(len(chosen), json=json) as progress,
        Stage(print_line if debug else lambda rank, line: None, prepare) as stage,
    ):
        for number, one in enumerate(chosen):
            progress(number, len(chosen), one.entry.id)
            try:
                verdicts.append(stage.reproduce(one.entry, one.file, one.ranks, planted=one.planted))
            except LaunchError as error:
                if len(chosen) == 1:
                    raise
                verdicts.append(not_started(one.entry, one.ranks, one.entry.device, str(error)))
            if json:
                print(encode(verdict_json(verdicts[-1])), flush=True)
    seconds = time.perf_counter() - began
    failed = [verdict for verdict in verdicts if not verdict.holds]
    if json:
        ids = [verdict.entry.id for verdict in failed]
        summary = {"event": "summary", "entries": len(verdicts), "failed": ids, "not_run": left_out}
        print(encode(summary | {"holds": not failed, "seconds": seconds}), flush=True)
    elif len(verdicts) == 1:
        _show(verdicts[0])
    else:
        _show_all(verdicts, failed, seconds)
        for name, remedy in left_out.items():
            print(f"not run: {name}; {remedy}")
    return 1 if failed else 0


def list_entries(kind: str | None, *, json: bool) -> None:
    """Print every fault that can be re-enacted.

    Raises:
        ConfigError: an unknown class.
    """
    found = _of_class(kind) if kind else list(entries().values())
    if json:
        for entry in found:
            print(encode({"event": "entry", **entry_json(entry)}))
        return
    _print_table(entry_table(found))
    print(f"\n{count_text(len(found), 'entry', 'entries')}; hpcli repro ID re-enacts one, hpcli repro --all re-enacts them all")


def new(name: str) -> None:
    """Write the skeleton of an entry and say what to do with it.

    Raises:
        ConfigError: it cannot be called so.
    """
    path = write_skeleton(name)
    print(f"wrote {path}, an entry that works; change it to your fault and run it with")
    print(f"  hpcli repro ./{path}")
    print(f"To keep it in the catalogue, move it to {FOLDER}")


def _show(verdict: Verdict) -> None:
    above, table, below = verdict_lines(verdict, fault_of(verdict.entry))
    print("\n".join(above))
    _print_table(table)
    print("\n".join(below))


def _print_table(table: Table) -> None:
    """The table without the blanks that rich fills its lines up with."""
    text = io.StringIO()
    plain_console(text, WIDTH).print(table)
    for line in text.getvalue().splitlines():
        print(line.rstrip())


def _show_all(verdicts: Sequence[Verdict], failed: Sequence[Verdict], seconds: float) -> None:
    _print_table(summary_table(verdicts))
    print()
    for verdict in failed:
        print(f"{verdict.entry.id}: " + "\n".join(conclusion_lines(verdict)))
    what = count_text(len(verdicts), "fault")
    if failed:
        print(f"{len(failed)} of {what} failed, in {seconds:.1f} s; hpcli repro ID shows one in full")
    else:
        print(f"{what}: each appears as reported, and the library is right, in {seconds:.1f} s")


def _chosen(names: Sequence[str], every: bool, kind: str | None, ranks: int | None) -> list[Chosen]:
    if bool(names) + every + (kind is not None) != 1:
        raise ConfigError([_problem("ID", "which? Give an ID, --all or --class; hpcli repro --list shows what there is")])
    if kind is not None:
        found = [(entry, module_of(entry)) for entry in _of_class(kind)]
    elif every:
        found = [(entry, module_of(entry)) for entry in entries().values()]
    else:
        found = [_named(name) for name in names]
    return [
        Chosen(entry, file, _ranks(entry, ranks), not hasattr(load_file(file), "wrong")) for entry, file in found
    ]


def _named(name: str) -> tuple[Entry, str]:
    """The entry of that id; of that planted fault; or in that file."""
    if name.endswith(".py"):
        return _of_file(name)
    by_fault = {fault: entry_of(fault) for fault in faults()}
    entry = entries().get(name) or by_fault.get(name)
    if entry is None:
        close = get_close_matches(name, [*entries(), *by_fault], 1, cutoff=0.5)
        guess = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError([_problem("ID", f"there is no entry {name!r}{guess} hpcli repro --list shows all of them")])
    return entry, module_of(entry)


def _of_file(name: str) -> tuple[Entry, str]:
    path = Path(name)
    if not path.is_file():
        raise ConfigError([_problem(name, f"there is no such file; hpcli repro --new {path.stem.replace('_', '-')} writes one")])
    try:
        module = load_file(path)
        entry = _usable(module)
    except Exception as error:
        raise ConfigError([_problem(name, f"cannot be used as an entry: {type(error).__name__}: {error}")]) from error
    return entry, str(path.resolve())


def _usable(module: ModuleType) -> Entry:
    """The entry of a module.

    Raises:
        ValueError, TypeError, AttributeError: something is missing, or is not what it can be.
    """
    entry = module.ENTRY
    if not isinstance(entry, Entry):
        raise TypeError("ENTRY is no hpcli.faults.entry.Entry")
    for what, value, known in (("kind", entry.kind, CLASSES), ("shown_by", entry.shown_by, SHOWN_BY)):
        if value not in known:
            raise ValueError(f"{what}={value!r}: one of {', '.join(known)}")
    if not callable(module.right) or not (hasattr(module, "wrong") or hasattr(module, "patch")):
        raise ValueError("it needs right(), and wrong() or patch()")
    return entry


def _of_class(kind: str) -> list[Entry]:
    if kind not in CLASSES:
        close = get_close_matches(kind, CLASSES, 1, cutoff=0.5)
        guess = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError([_problem("--class", f"there is no class {kind!r}{guess} There are: {', '.join(CLASSES)}")])
    return [entry for entry in entries().values() if entry.kind == kind]


def _ranks(entry: Entry, asked: int | None) -> int:
    if asked is None or asked in entry.ranks:
        return asked or entry.ranks[0]
    choices = " or ".join(map(str, entry.ranks))
    raise ConfigError([_problem("--ranks", f"{entry.id} is shown on {choices} rank{'s' * (entry.ranks != (1,))}, not on {asked}")])


def _problem(where: str, message: str) -> Problem:
    return Problem(where, None, None, "", message)
