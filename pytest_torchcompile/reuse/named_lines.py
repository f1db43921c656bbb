"""NamedLines: the lines of the project that an observation names, and where they are after an edit of comments.

A report names lines: of graph breaks, recompiles, functions. An edit of comments, docstrings or blank lines moves them
and changes no code. Each line is kept as the node of the syntax tree that begins in it. The definition around it is the
same as then, for the key of the cell tells that, so the same node is in it, at the line of today.

A line that can't be found again, or whose own text is another one, makes the cell run: a report never shows an old one.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.reuse.definitions import numbered_definitions

__all__ = ["LinesMoved", "NamedLines", "find_lines", "move_lines"]

_PLACE: Final = re.compile(r"(?P<file>[^\s\"'(),;<>]+\.py)(?P<between>\"?(?::|, line ))(?P<line>\d+)")
"""``models.py:12`` and ``File "models.py", line 12``."""
_BARE: Final = re.compile(r"(?P<between>\bline |_at_)(?P<line>\d+)")
"""A line of a file that is named beside it, as in ``torch_dynamo_resume_in_forward_at_12``."""
_EITHER: Final = re.compile(f"{_PLACE.pattern}|{_BARE.pattern.replace('?P<', '?P<bare_')}")
_NUMBERS: Final = frozenset({"line", "resumed_at"})
"""Keys of numbers that are lines of the ``file`` beside them."""
_NOT_SHOWN: Final = frozenset({"code_texts", "comparisons"})
"""Fields of an observation that are in no report."""
_UNPLACED: Final = ""
"""Stands for a file where nobody can tell which one is meant."""

Visit = Callable[[str, int], int]
"""Takes a file of the project, or :data:`_UNPLACED`, and a line; returns the line to write."""


@dataclass(frozen=True)
class NamedLines:
    """What is kept of the lines that an observation names."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """File of the project to the hash of its bytes."""
    anchors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """File to line, as text, to the name of its node and the hash of its text; an empty text where there is no node."""
    unplaced: bool = False
    """Does it name a line of which nobody can tell the file?"""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"digests": dict(self.digests), "anchors": {file: dict(each) for file, each in self.anchors.items()},
                "unplaced": self.unplaced}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NamedLines:
        """Make it from what :meth:`to_dict` returned. Raises TypeError for other keys."""
        return cls(**data)


class LinesMoved(Exception):
    """A line can't be found again; the text says which."""


def find_lines(observation: Mapping[str, Any], files: Collection[str], root: Path) -> NamedLines:
    """The lines of some files that an observation names. Raises OSError or SyntaxError for a file that can't be read.

    ``files``: from ``root``, or absolute.
    """
    named: dict[str, set[int]] = {}

    def note(file: str, line: int) -> int:
        named.setdefault(file, set()).add(line)
        return line

    _rewrite(observation, _FileNames(files, root), "", note)
    # Of these only that there are any is kept: no file can be asked for them.
    unplaced = named.pop(_UNPLACED, None) is not None
    anchors = {}
    for file, lines in named.items():
        known = _anchored_lines((root / file).read_bytes()).by_line
        anchors[file] = {str(line): known.get(line, "") for line in lines}
    digests = {file: _digest_of((root / file).read_bytes()) for file in files}
    return NamedLines(digests, anchors, unplaced)


def move_lines(observation: dict[str, Any], kept: NamedLines, root: Path) -> dict[str, Any]:
    """The observation with the lines of today. Raises LinesMoved for one that is not found.

    Raises OSError or SyntaxError for a file that can't be read.
    """
    edited = {}
    for file, digest in kept.digests.items():
        data = (root / file).read_bytes()
        if _digest_of(data) != digest:
            edited[file] = data
    if not edited:
        return observation
    # It may be of the edited file or of another one, so nobody can say whether it has moved.
    if kept.unplaced:
        raise LinesMoved(f"{min(edited)} was edited, and its report names a line without a file")
    now: dict[str, dict[int, int]] = {}
    for file in edited.keys() & kept.anchors.keys():
        now[file] = _lines_of_today(file, kept.anchors[file], edited[file])
    if not any(map(_has_moved, now.values())):
        return observation

    def move(file: str, line: int) -> int:
        return now[file][line] if file in now else line

    moved: dict[str, Any] = _rewrite(observation, _FileNames(kept.digests, root), "", move)
    return moved


def _has_moved(lines: Mapping[int, int]) -> bool:
    return any(line != today for line, today in lines.items())


def _lines_of_today(file: str, anchors: Mapping[str, str], data: bytes) -> dict[int, int]:
    known = _anchored_lines(data).by_anchor
    lines = {}
    for line, anchor in anchors.items():
        if not anchor or anchor not in known:
            raise LinesMoved(f"{file}:{line}, which its report names, is not as it was")
        lines[int(line)] = known[anchor]
    return lines


# the nodes that begin in each line


@dataclass(frozen=True)
class _AnchoredLines:
    by_line: Mapping[int, str]
    """The anchor of each line in which a node begins: the first of these in the order of ``ast.walk``."""
    by_anchor: Mapping[str, int]
    """The line of every node."""


# By the bytes, not by the path: a file has two texts here, that of the run and today's.
@functools.lru_cache(maxsize=256)
def _anchored_lines(data: bytes) -> _AnchoredLines:
    tree = ast.parse(data)
    text = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    by_line: dict[int, str] = {}
    by_anchor: dict[str, int] = {}
    ends = _ends_of_lines(tree)
    for name, nodes in numbered_definitions(tree):
        inside = itertools.chain.from_iterable(map(ast.walk, nodes))
        for number, node in enumerate(inside):
            line = getattr(node, "lineno", 0)
            # A parameter list or an operator stands at no place of its own.
            if not line:
                continue
            shown = "\n".join(text[line - 1 : ends[line]])
            anchor = f"{name}/{number}/{_digest_of(shown.encode())[:16]}"
            by_anchor[anchor] = line
            by_line.setdefault(line, anchor)
    return _AnchoredLines(by_line, by_anchor)


def _ends_of_lines(tree: ast.AST) -> dict[int, int]:
    """For each line the last one of what begins in it, which a traceback may show; of a function its first line."""
    ends: dict[int, int] = {}
    for node in ast.walk(tree):
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
        if isinstance(node, ast.stmt) and hasattr(node, "body"):
            end = line
        ends[line] = max(ends.get(line, 0), end)
    return ends


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# lines in plain data


class _FileNames:
    """Which file of the project a report means."""

    def __init__(self, files: Collection[str], root: Path) -> None:
        self._files = frozenset(files)
        self._root = root
        self._known: dict[str, str | None] = {}

    def find(self, written: str) -> str | None:
        """The file; :data:`_UNPLACED` where it could be one, and None for one that is not of the project."""
        if written not in self._known:
            self._known[written] = self._look_for(written)
        return self._known[written]

    def _look_for(self, written: str) -> str | None:
        name = os.path.normpath(written)
        if os.path.isabs(name) and name not in self._files:
            name = Path(os.path.relpath(name, self._root)).as_posix()
        if name in self._files:
            return name
        # Torch shortens a path by what it has in common with its own.
        for file in self._files:
            path = os.path.join("", str(self._root / file))
            if path.endswith(f"/{name}") and name.endswith(f"/{file}"):
                return file
            if file.endswith(f"/{name}"):
                return _UNPLACED
        return None


def _rewrite(value: Any, files: _FileNames, context: str, visit: Visit) -> Any:
    """A copy in which the project's lines are what ``visit`` returns. ``context``: the file that is named beside."""
    if isinstance(value, str):
        return _rewrite_text(value, files, context, visit)
    if isinstance(value, (list, tuple)):
        return [_rewrite(each, files, context, visit) for each in value]
    if not isinstance(value, Mapping):
        return value
    beside = value.get("file")
    if isinstance(beside, str) and beside:
        context = beside
    written = {}
    for key, each in value.items():
        if key in _NOT_SHOWN:
            written[key] = each
        # Not isinstance: True and False are ints to Python, and no lines.
        elif key in _NUMBERS and type(each) is int:
            written[key] = _rewrite_number(each, files, context, visit)
        else:
            name = _rewrite_text(key, files, context, visit) if isinstance(key, str) else key
            written[name] = _rewrite(each, files, context, visit)
    return written


def _rewrite_number(line: int, files: _FileNames, context: str, visit: Visit) -> int:
    # Records have 0 where there is no line.
    if not line:
        return line
    file = files.find(context) if context else _UNPLACED
    return line if file is None else visit(file, line)


def _rewrite_text(text: str, files: _FileNames, context: str, visit: Visit) -> str:
    def replaced(found: re.Match[str]) -> str:
        if found["file"]:
            before, line = found["file"] + found["between"], found["line"]
            file = files.find(found["file"])
        else:
            before, line = found["bare_between"], found["bare_line"]
            file = files.find(context) if context else _UNPLACED
        if file is None:
            return found[0]
        return f"{before}{visit(file, int(line))}"

    return _EITHER.sub(replaced, text)
