"""Reader: takes typed values out of a node tree and collects every mistake, each with its line and column."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import yaml

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.errors import MatrixError, nearest
from pytest_torchcompile.plan.nodes import describe_node

__all__ = ["DAY", "MISSING", "Missing", "Mistake", "Reader"]

SHOWN_PROBLEMS: Final = 20
LONGEST: Final = 800
"""Characters of one text."""
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
DAY: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_WORDS: Final[dict[str, Scalar]] = {"true": True, "false": False, "null": None, "~": None}
# What YAML 1.1 makes of a plain word, and a reader of the file does not expect.
_READ_AS: Final = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing",
                   "timestamp": "a date", "merge": "a merge key", "value": "a default key"}


class Missing:
    """The type of :data:`MISSING`."""


MISSING: Final = Missing()
"""No value, because there is a mistake; None is a value."""


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """One mistake; line and column count from 1."""

    line: int
    column: int
    text: str


class Reader:
    """Reads nodes of one file.

    A method that finds a mistake notes it, and returns None, MISSING or fewer entries.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.mistakes: list[Mistake] = []
        self.notes: list[str] = []

    def note(self, node: yaml.Node, text: str) -> None:
        """Note something that is worth knowing, at the node's place, and no mistake."""
        self.notes.append(f"{self.path}:{node.start_mark.line + 1}: {text}")

    def wrong(self, node: yaml.Node, text: str) -> None:
        """Note a mistake at the node."""
        if len(text) > LONGEST:
            text = f"{text[:LONGEST]}..."
        self.mistakes.append(Mistake(node.start_mark.line + 1, node.start_mark.column + 1, text))

    def finish(self) -> None:
        """Raise :class:`MatrixError` if there are mistakes: one a line, in the order of the file."""
        if not self.mistakes:
            return
        # A node that an alias stands for is read more than once.
        first, *others = sorted(set(self.mistakes))
        lines = [first.text]
        for mistake in others:
            lines.append(f"{self.path}:{mistake.line}:{mistake.column}: {mistake.text}")
        if len(lines) > SHOWN_PROBLEMS:
            lines[SHOWN_PROBLEMS:] = [f"... and {len(lines) - SHOWN_PROBLEMS} more"]
        raise MatrixError(self.path, first.line, first.column, "\n".join(lines))

    def where(self, node: yaml.Node) -> str:
        """Return ``file:line``."""
        return f"{self.path}:{node.start_mark.line + 1}"

    def entries(self, node: yaml.Node, what: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
        """Return (key, node of the key, node of the value) of a mapping, without keys given twice."""
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, f"{what}: found {describe_node(node)}, expected a mapping")
            return []
        entries: dict[str, tuple[str, yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            name = self.text(key, f"a key of {what}")
            # YAML itself would take the last one, and drop the first without a word.
            if name in entries:
                first = entries[name][1].start_mark.line + 1
                self.wrong(key, f"key {name!r} is given twice, first in line {first}")
            elif name is not None:
                entries[name] = (name, key, value)
        return list(entries.values())

    def fields(self, node: yaml.Node, what: str, known: Collection[str],
               required: Iterable[str] = ()) -> dict[str, yaml.Node]:
        """Return the values of a mapping whose keys are known beforehand."""
        before = len(self.mistakes)
        values = {}
        for name, key, value in self.entries(node, what):
            if name in known:
                values[name] = value
            else:
                self.wrong(key, f"unknown key {name!r} in {what}; {nearest(name, known)}")
        missing = [name for name in required if name not in values]
        # After another mistake the key is likely there, misspelt.
        if missing and len(self.mistakes) == before:
            self.wrong(node, f"{what}: key {missing[0]!r} is missing")
        return values

    def items(self, node: yaml.Node, what: str, *, alone: bool = False) -> list[yaml.Node]:
        """Return the entries of a list that is not empty; if ``alone``, a scalar stands for a list of one."""
        if alone and isinstance(node, yaml.ScalarNode):
            return [node]
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(node, f"{what}: found {describe_node(node)}, expected a list")
            return []
        if not node.value:
            self.wrong(node, f"{what}: the list is empty; expected at least one entry")
        return list(node.value)

    def text(self, node: yaml.Node, what: str) -> str | None:
        """Return a string that has something in it."""
        if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
            self.wrong(node, f"{what}: found {describe_node(node)}, expected a text")
            return None
        other = _read_as(node)
        if other and not node.style:
            self.wrong(node, f"{what}: YAML reads {node.value} as {other}, expected a text; quote it")
            return None
        return str(node.value)

    def name(self, node: yaml.Node, what: str, known: Iterable[str]) -> str | None:
        """Return one of the known names."""
        known = list(known)
        text = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
        if text in known:
            return text
        self.wrong(node, f"{describe_node(node)} is not {what}; {nearest(text, known)}")
        return None

    def number(self, node: yaml.Node, what: str, *, whole: bool = True, least: float = 0,
               most: float | None = None) -> int | float | None:
        """Return a number, as JSON writes them, from ``least`` to ``most``."""
        pattern, expected = _NUMBER, "a number"
        if whole:
            pattern, expected = _INTEGER, "a whole number"
        if not isinstance(node, yaml.ScalarNode) or node.style or not pattern.fullmatch(node.value):
            self.wrong(node, f"{what}: found {describe_node(node)}, expected {expected}")
            return None
        # A whole number stays an int, which holds more digits than a float.
        value: int | float
        if _INTEGER.fullmatch(node.value):
            value = int(node.value)
        else:
            value = float(node.value)
        too_large = most is not None and value > most
        if value < least or too_large:
            limits = f"at least {least:g}"
            if most is not None:
                limits = f"from {least:g} to {most:g}"
            self.wrong(node, f"{what}: found {node.value}, expected {expected} {limits}")
            return None
        return value

    def integer(self, node: yaml.Node, what: str, *, least: int = 0) -> int | None:
        """Return a whole number of at least ``least``."""
        value = self.number(node, what, least=least)
        if value is None:
            return None
        return int(value)

    def date(self, node: yaml.Node, what: str) -> datetime.date | None:
        """Return a day."""
        try:
            if isinstance(node, yaml.ScalarNode) and re.fullmatch(DAY, node.value):
                return datetime.date.fromisoformat(node.value)
        except ValueError:
            # Such as 2027-02-30, which is told below.
            pass
        self.wrong(node, f"{what}: found {describe_node(node)}, expected a day as YYYY-MM-DD")
        return None

    def scalar(self, node: yaml.Node, what: str) -> Scalar | Missing:
        """Return a text, number, true, false or null; refuse what YAML 1.1 and a human read differently."""
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, f"{what}: found {describe_node(node)}, expected a text, a number, true, false or null")
            return MISSING
        text: str = node.value
        # What is quoted is a text, whatever it looks like.
        if node.style:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        if _NUMBER.fullmatch(text):
            return self._read_float(node, what)
        other = _read_as(node)
        if other is None:
            return text
        self.wrong(node, f"{what}: found {describe_node(node)}, which YAML reads as {other}; quote it to mean a text")
        return MISSING

    def _read_float(self, node: yaml.ScalarNode, what: str) -> float | Missing:
        value = float(node.value)
        # 2.10 is the number 2.1, and likely meant as a version: ask.
        if re.search(r"\.[0-9]+0$", node.value):
            self.wrong(node, f"{what}: YAML reads {node.value} as {value}; quote it to mean a text")
            return MISSING
        if value in (float("inf"), float("-inf")):
            self.wrong(node, f"{what}: {node.value} is too large a number")
            return MISSING
        return value


def _read_as(node: yaml.Node) -> str | None:
    """What YAML 1.1 makes of a plain word; None for a text."""
    return _READ_AS.get(node.tag.rsplit(":", 1)[-1])
