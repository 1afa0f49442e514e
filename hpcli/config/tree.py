"""YAML text to plain values, each with the place it came from.

PyYAML parses; whatever gives YAML a meaning beyond lists, mappings and scalars is left out: tags, merge keys,
several documents. Duplicate keys are refused, and depth and number of values are bounded, so that no file,
however it was made, costs more than a moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from hpcli.config.describe import Path
from hpcli.config.errors import Problem, dotted, one_line, shorten
from hpcli.config.scalars import resolve_plain

MAX_DEPTH = 20
MAX_VALUES = 5_000


class Place(NamedTuple):
    """Where a value stands, and how it was written if it is a scalar (`text` is None if it is not)."""

    source: str
    line: int | None
    text: str | None
    quoted: bool


@dataclass
class Tree:
    """The values of a YAML text: `value` is None if there are none, `places` has an entry for each path."""

    source: str
    value: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class Unreadable(Exception):
    """The text ends here: nothing after this point can be trusted."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def read_tree(text: str, source: str, *, prefix: Path = (), numbered: bool = True) -> Tree:
    """Parse `text`. With `numbered` false it is the value of an option, so that lines mean nothing.

    `prefix` is the path at which the value stands.

    Raises:
        Unreadable: with the one problem that stopped it.
    """
    tree = Tree(source)
    builder = _Builder(tree, numbered)
    try:
        composer = _Composer(text, builder)
        node = composer.compose_only()
        if node is not None:
            tree.value = builder.build(node, prefix, node.start_mark, ())
    except yaml.MarkedYAMLError as error:
        raise Unreadable(builder.syntax_problem(error)) from None
    except (ValueError, OverflowError, IndexError, yaml.YAMLError) as error:
        # PyYAML 6.0 lets these through from its own code: "\UFFFFFFFF", "%YAML 99999999999999999999.1"
        message = f"cannot be read as YAML: {shorten(str(error), 100)}"
        raise Unreadable(
            Problem(source, composer.line + 1 if numbered else None, None, "", message)
        ) from None
    return tree


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's node graph, refusing depth, tags and a second document as they come."""

    def __init__(self, text: str, builder: _Builder) -> None:
        self.builder = builder
        self.depth = 0
        self.composed = 0
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def compose_only(self) -> yaml.Node | None:
        self.get_event()  # the start of the stream
        if self.check_event(yaml.StreamEndEvent):
            return None
        node = self.compose_document()
        if not self.check_event(yaml.StreamEndEvent):
            mark = self.peek_event().start_mark
            raise self.builder.fatal(mark, "a second document begins here; a configuration is one document")
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self.composed += 1
        if self.composed > 2 * MAX_VALUES:  # keys are nodes too
            raise self.builder.too_many(event.start_mark)
        if self.depth >= MAX_DEPTH:
            raise self.builder.fatal(event.start_mark, f"nested more than {MAX_DEPTH} levels deep")
        tag = getattr(event, "tag", None)
        if tag is not None:
            written = shorten(tag.replace("tag:yaml.org,2002:", "!!"), 40)
            self.builder.report(
                event.start_mark, "", f"the tag {written} is not supported; write the plain value"
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Builder:
    """Turns nodes into values and records their places."""

    def __init__(self, tree: Tree, numbered: bool) -> None:
        self.tree = tree
        self.numbered = numbered
        self.count = 0

    def line(self, mark: Any) -> int | None:
        return mark.line + 1 if self.numbered else None

    def problem(self, mark: Any, key: str, message: str, *, column: bool = False) -> Problem:
        at = mark.column + 1 if column and self.numbered else None
        return Problem(self.tree.source, self.line(mark), at, key, message)

    def report(self, mark: Any, key: str, message: str) -> None:
        self.tree.problems.append(self.problem(mark, key, message))

    def fatal(self, mark: Any, message: str) -> Unreadable:
        return Unreadable(self.problem(mark, "", message))

    def too_many(self, mark: Any) -> Unreadable:
        return self.fatal(mark, f"more than {MAX_VALUES} values, counting what aliases repeat")

    def syntax_problem(self, error: yaml.MarkedYAMLError) -> Problem:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context or "syntax error"
        message = f"YAML syntax error: {shorten(said, 120)}"
        if error.context and error.problem:
            since = ""
            if self.numbered and error.context_mark and mark and error.context_mark.line != mark.line:
                since = f" that begins on line {error.context_mark.line + 1}"
            message += f" ({shorten(error.context, 120)}{since})"
        hint = _syntax_hint(f"{said} {error.context or ''}")
        message += f"; {hint}" if hint else ""
        return (
            self.problem(mark, "", message, column=True)
            if mark
            else Problem(self.tree.source, None, None, "", message)
        )

    def build(self, node: yaml.Node, path: Path, mark: Any, above: tuple[yaml.Node, ...]) -> Any:
        """The value of `node`, which stands at `path`; `mark` is the beginning of its key or list item."""
        self.count += 1
        if self.count > MAX_VALUES:
            raise self.too_many(mark)
        if node in above:
            raise self.fatal(mark, f"{dotted(path) or 'the file'} contains itself through an alias")
        if len(above) >= MAX_DEPTH:
            raise self.fatal(mark, f"nested more than {MAX_DEPTH} levels deep")
        scalar = node.value if isinstance(node, yaml.ScalarNode) else None
        quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
        self.tree.places[path] = Place(self.tree.source, self.line(mark), scalar, quoted)
        if scalar is not None:
            return scalar if quoted else resolve_plain(scalar)
        above = (*above, node)
        if isinstance(node, yaml.MappingNode):
            return self.build_mapping(node.value, path, above)
        return [self.build(item, (*path, i), item.start_mark, above) for i, item in enumerate(node.value)]

    def build_mapping(
        self, pairs: Iterable[tuple[yaml.Node, yaml.Node]], path: Path, above: tuple[yaml.Node, ...]
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, Any] = {}
        for key_node, value_node in pairs:
            mark = key_node.start_mark
            if not isinstance(key_node, yaml.ScalarNode):
                self.report(
                    mark,
                    dotted(path),
                    "a list or a mapping stands where a key should be; keys are plain words",
                )
                continue
            key = key_node.value
            here = (*path, key)
            if key == "<<" and key_node.style is None:
                self.report(mark, dotted(path), "merge keys (<<) are not supported; write the keys out")
            elif key in result:
                where = f"on line {first[key].line + 1}" if self.numbered else "before"
                self.report(mark, dotted(here), f"duplicate key; it is already given {where}")
            else:
                first[key] = mark
                result[key] = self.build(value_node, here, mark, above)
        return result


def _syntax_hint(said: str) -> str:
    if r"'\t'" in one_line(said):
        return "indent with spaces, not with a tab"
    if said.startswith("mapping values are not allowed"):
        return "check the indentation, or quote a value that contains ': '"
    if "'*'" in said or "alias" in said:
        return "quote a value that begins with * or &"
    if "'%'" in said or "'@'" in said or "'`'" in said:
        return "quote a value that begins with a special character"
    return ""
