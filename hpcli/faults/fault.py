"""What there is to say about a known fault."""

from __future__ import annotations

from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A fault that has been seen in the world and can be planted into a training step here. What it gives in the smallest case is
    in the ``ENTRY`` of the same file.

    Attributes:
        title: in a few words.
        source: the public report, as ``repository#number``.
        rule: the rule of this library that is reverted.
        layout: the layout that carries it, as ``check-norm --layout`` names it; ``{ranks}`` and ``{half}`` are filled in.
        cause: what check-norm must name, an id of :mod:`hpcli.check.causes`.
    """

    title: str
    source: str
    rule: str
    layout: str
    cause: str


def replace(owner: Any, name: str, by: Any) -> None:
    """Put ``by`` in the place of the function, method or attribute ``name`` of a module or class."""
    getattr(owner, name)  # a rule that has moved must not be missed
    setattr(owner, name, by)
