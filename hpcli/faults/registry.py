"""Finds the faults, and plants one into this process."""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from importlib import import_module

from hpcli.faults import known
from hpcli.faults.fault import Fault


@lru_cache(maxsize=1)
def faults() -> dict[str, Fault]:
    """Every fault by its id: the module's name, with dashes."""
    return {
        module.name.replace("_", "-"): import_module(f"{known.__name__}.{module.name}").FAULT
        for module in pkgutil.iter_modules(known.__path__)
    }


def plant(fault: str) -> None:
    """Revert the rule of ``fault`` in this process, for good. For rank processes only."""
    import_module(f"{known.__name__}.{fault.replace('-', '_')}").patch()
