"""Finds the faults. A module in ``hpcli/faults/known`` is all that one needs; there is no list.

One file may carry both sides of a fault: ``FAULT`` and ``patch``, which ``check-norm --inject`` plants into a whole training
step, and ``ENTRY`` with ``right`` (and ``wrong``), which ``repro`` re-enacts in its smallest form.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from hpcli.faults import known
from hpcli.faults.entry import Entry
from hpcli.faults.fault import Fault

FOLDER = Path(known.__path__[0])


@lru_cache(maxsize=1)
def _modules() -> dict[str, ModuleType]:
    return {
        module.name.replace("_", "-"): import_module(f"{known.__name__}.{module.name}")
        for module in pkgutil.iter_modules(known.__path__)
    }


@lru_cache(maxsize=1)
def faults() -> dict[str, Fault]:
    """Every fault that can be planted, by its id: the module's name, with dashes."""
    return {name: module.FAULT for name, module in _modules().items() if hasattr(module, "FAULT")}


@lru_cache(maxsize=1)
def entries() -> dict[str, Entry]:
    """Every fault that can be re-enacted, by the id of its entry, the headlines first."""
    found = [module.ENTRY for module in _modules().values() if hasattr(module, "ENTRY")]
    found.sort(key=lambda entry: (not entry.id.startswith("issue-"), _natural(entry.id)))
    by_id = {entry.id: entry for entry in found}
    if len(by_id) < len(found):
        raise ValueError("two files in hpcli/faults/known have an entry of the same id")
    return by_id


def fault_of(entry: Entry) -> str | None:
    """The name under which ``check-norm --inject`` plants the same fault; None where it cannot."""
    return next((n for n, m in _modules().items() if getattr(m, "ENTRY", None) is entry and hasattr(m, "FAULT")), None)


def entry_of(fault: str) -> Entry:
    """The entry in the file of a fault that can be planted, which shows it in its smallest form."""
    entry: Entry = _modules()[fault].ENTRY
    return entry


def module_of(entry: Entry) -> str:
    """The file that defines ``entry``."""
    return next(str(m.__file__) for m in _modules().values() if getattr(m, "ENTRY", None) is entry)


def load_file(path: str | Path) -> ModuleType:
    """The module of an entry, by its file: that of one's own need not be part of the package."""
    path = Path(path).resolve()
    if path.parent == FOLDER:
        return import_module(f"{known.__name__}.{path.stem}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plant(fault: str) -> None:
    """Revert the rule of ``fault`` in this process, for good. For rank processes only."""
    import_module(f"{known.__name__}.{fault.replace('-', '_')}").patch()


def _natural(name: str) -> tuple[str, int]:
    project, _, number = name.rpartition("-")
    return (project, int(number)) if number.isdigit() else (name, 0)
