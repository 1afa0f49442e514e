"""From a YAML file and command-line overrides to a checked `Config`, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcli.config import describe
from hpcli.config.check import check, nearest_place
from hpcli.config.errors import ConfigError, Problem
from hpcli.config.overrides import Override, apply_override
from hpcli.config.reading import read_text
from hpcli.config.schema import Config
from hpcli.config.tree import Place, Tree, Unreadable, read_tree


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration whose every value is allowed by itself; `resolve_config` says if they fit together.

    `file` is the path as the user wrote it.
    """

    config: Config
    file: str
    places: Mapping[describe.Path, Place]

    @property
    def lines(self) -> dict[str, int]:
        """The line of every key that the file has and no override replaced, by dotted key."""
        return {
            ".".join(map(str, path)): place.line for path, place in self.places.items() if path and place.line
        }

    @property
    def sources(self) -> dict[str, str]:
        """The option, such as `--set training.steps=3`, of every key that an override gave, by dotted key."""
        return {
            ".".join(map(str, p)): place.source
            for p, place in self.places.items()
            if p and place.source != self.file
        }

    def is_set(self, key: str) -> bool:
        """Whether the file or an override gives `key` (dotted) a value."""
        return tuple(key.split(".")) in self.places

    def problem(self, key: str, message: str) -> Problem:
        """A problem at the place of `key` (dotted), or of the section around it; of the whole where it came from no file."""
        if not self.places:
            return Problem(self.file, None, None, key, message)
        place = nearest_place(key.split("."), dict(self.places))
        return Problem(place.source, place.line, None, key, message)


def load_config(path: Path | str, overrides: Sequence[str | Override] = ()) -> LoadedConfig:
    """Read a configuration file, apply overrides in their order, and check every key and value.

    Raises:
        ConfigError: with every problem found, in the order of the file, overrides last.
    """
    file = str(path)
    try:
        tree = read_tree(read_text(Path(path)), file)
    except Unreadable as stopped:
        raise ConfigError([stopped.problem]) from None
    if not isinstance(tree.value, dict):
        raise ConfigError([*tree.problems, _not_a_mapping(tree)])
    for override in overrides:
        apply_override(tree, override if isinstance(override, Override) else Override(override))
    config, problems = check(tree.value, tree.places)
    problems += tree.problems
    if problems or config is None:
        raise ConfigError(problems)
    return LoadedConfig(config, file, tree.places)


def _not_a_mapping(tree: Tree) -> Problem:
    example = "a configuration has sections, such as\nmodel: {preset: decoder-tiny}".replace("\n", " ")
    if tree.value is None:
        return Problem(tree.source, None, None, "", f"there is nothing in this file; {example}")
    line = tree.places[()].line
    what = "a list" if isinstance(tree.value, list) else "a single value"
    return Problem(tree.source, line, None, "", f"the file holds {what}; {example}")
