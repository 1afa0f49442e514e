"""`--set training.steps=3`: one key of the file replaced from the command line."""

from __future__ import annotations

from typing import Any, NamedTuple

from hpcli.config.errors import Problem, dotted, shorten
from hpcli.config.schema import SECTIONS
from hpcli.config.suggest import unknown_key
from hpcli.config.tree import Path, Place, Tree, Unreadable, read_tree


class Override(NamedTuple):
    """`text` is `section.key=value`; `label` is how messages name it, `--set TEXT` if left out."""

    text: str
    label: str = ""

    @property
    def source(self) -> str:
        """What messages about it begin with."""
        return self.label or f"--set {shorten(self.text, 100)}"


def apply_override(tree: Tree, override: Override) -> None:
    """Put the override's value into `tree`, in place of the file's; problems are added to the tree's."""
    key, equals, text = override.text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    path: Path = tuple(parts)

    def report(message: str, at: Path = ()) -> None:
        tree.problems.append(Problem(override.source, None, None, dotted(at), message))

    if not equals or not all(parts):
        return report("expected KEY=VALUE, such as training.steps=10")
    try:
        read = read_tree(text, override.source, prefix=path, numbered=False)
    except Unreadable as stopped:
        tree.problems.append(stopped.problem)
        return None
    tree.problems += read.problems
    node: Any = tree.value
    for depth, part in enumerate(parts[:-1], start=1):
        if not isinstance(node.get(part), dict):
            inside = node.get(part)
            if depth == 1 and part in SECTIONS and inside is not None:
                return None  # the file has a value where a section belongs, and that is what will be reported
            if inside is not None:
                return report(unknown_key(path), path)
            node[part] = {}
            tree.places.setdefault(path[:depth], Place(override.source, None, None, False))
        node = node[part]
    node[parts[-1]] = read.value
    for old in [place for place in tree.places if place[: len(path)] == path]:
        del tree.places[old]
    tree.places[path] = Place(override.source, None, text.strip() or None, False)
    tree.places.update(read.places)
    return None
