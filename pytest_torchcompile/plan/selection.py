"""Selections of which nothing, or less than was named, would be left, and nobody told why. No pytest, no torch.

``-m "compile_cell(backend='eager')"``: does it speak of axes and values that the matrix has?
``--compile-checks=NAMES``: has each of them something to judge in it, and in which cells?
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.quantity import count

__all__ = ["idle_cells", "refuse_idle", "refuse_unknown"]

_ARGUMENT: Final = r"(\w+)\s*=\s*('[^']*'|\"[^\"]*\"|[\w.+-]+)"
_MARKER: Final = re.compile(rf"\bcompile_cell\s*\(\s*((?:{_ARGUMENT}\s*,?\s*)*)\)")


def refuse_unknown(expression: str, cells: Iterable[Mapping[str, Any]]) -> None:
    """Raise :class:`UsageError` for an axis that no cell has, or a value that no cell has on its axis.

    To pytest both are just no match: ``-m`` would select nothing, and with ``not`` everything.

    :param expression: what ``-m`` was given; its grammar is left to pytest.
    :param cells: axis name to value of each cell of the matrix.
    """
    named = list(_named_values(expression))
    if not named:
        return
    # A dict, not a set: the values stay in the order of the matrix.
    known: dict[str, dict[Any, None]] = {}
    for cell in cells:
        for axis, value in cell.items():
            known.setdefault(axis, {})[value] = None
    for axis, value in named:
        if axis not in known:
            raise UsageError(f"-m: no cell of the matrix has an axis {axis!r}; {nearest(axis, known)}")
        if value not in known[axis] or type(value) not in map(type, known[axis]):
            # 2 and '2' are different values, and read alike in a message.
            alike = [other for other in known[axis] if str(other) == str(value)]
            if alike:
                hint = f"write {axis}={alike[0]!r}"
            else:
                hint = nearest(str(value), map(str, known[axis]))
            raise UsageError(f"-m: no cell of the matrix has {axis}={value!r}; {hint}")


def refuse_idle(names: Iterable[str], cells: Sequence[Mapping[str, Any]], given: str, *, each: bool) -> None:
    """Raise :class:`UsageError` if no cell at all has anything to judge for one of the checks, ``each``, or for all.

    :param given: where the checks are named.
    :param each: somebody asked for these very checks; else they may be those of every matrix.
    """
    reasons_of = {name: _idle_reasons(name, cells) for name in names}
    # The empty reason is that of a cell in which the check has something to judge.
    idle = [name for name, reasons in reasons_of.items() if cells and "" not in reasons]
    if not idle or not (each or len(idle) == len(reasons_of)):
        return
    name = idle[0]
    [(text, times)] = reasons_of[name].most_common(1)
    share = ""
    if times < len(cells):
        share = f" ({times} of {count(len(cells), 'cell')})"
    raise UsageError(f"{given}: {name} has nothing to judge in any cell of the matrix: {text}{share}")


def idle_cells(names: Iterable[str], cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each check and each reason why some of the cells have no such check."""
    for name in names:
        for text, times in _idle_reasons(name, cells).most_common():
            if text:
                yield f"{name} has nothing to judge in {times} of {count(len(cells), 'cell')}: {text}"


def _idle_reasons(name: str, cells: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Why the check has nothing to judge in a cell, and in how many; empty: it has."""
    return Counter(CHECKS[name].idle(cell) for cell in cells)


def _named_values(expression: str) -> Iterator[tuple[str, Any]]:
    for marker in _MARKER.finditer(expression):
        for axis, text in re.findall(_ARGUMENT, marker[1]):
            try:
                yield axis, ast.literal_eval(text)
            except (ValueError, SyntaxError):
                # pytest says what is wrong with it.
                continue
