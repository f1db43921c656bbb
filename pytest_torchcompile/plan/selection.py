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
    named = list(_named(expression))
    if not named:
        return
    known: dict[str, dict[Any, None]] = {}
    for cell in cells:
        for axis, value in cell.items():
            known.setdefault(axis, {})[value] = None
    for axis, value in named:
        if axis not in known:
            raise UsageError(f"-m: no cell of the matrix has an axis {axis!r}; {nearest(axis, known)}")
        if value not in known[axis] or type(value) not in map(type, known[axis]):
            same = next((found for found in known[axis] if str(found) == str(value)), None)
            told = nearest(str(value), map(str, known[axis])) if same is None else f"write {axis}={same!r}"
            raise UsageError(f"-m: no cell of the matrix has {axis}={value!r}; {told}")


def refuse_idle(names: Iterable[str], cells: Sequence[Mapping[str, Any]], given: str, *, each: bool) -> None:
    """Raise :class:`UsageError` if no cell at all has anything to judge for one of the checks, ``each``, or for all.

    :param given: where the checks are named.
    :param each: somebody asked for these very checks; else they may be those of every matrix.
    """
    idle = {name: _idle(name, cells) for name in names}
    wrong = {name: why for name, why in idle.items() if cells and "" not in why}
    if each or len(wrong) == len(idle):
        for name, why in wrong.items():
            for text, times in why.most_common(1):
                raise UsageError(f"{given}: {name} has nothing to judge in any cell of the matrix: {text}"
                                 + (f" ({times} of {count(len(cells), 'cell')})" if times < len(cells) else ""))


def idle_cells(names: Iterable[str], cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each check and each reason why some of the cells have no such check."""
    for name in names:
        for text, times in _idle(name, cells).most_common():
            if text:
                yield f"{name} has nothing to judge in {times} of {count(len(cells), 'cell')}: {text}"


def _idle(name: str, cells: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(CHECKS[name].idle(cell) for cell in cells)


def _named(expression: str) -> Iterator[tuple[str, Any]]:
    for marker in _MARKER.finditer(expression):
        for axis, text in re.findall(_ARGUMENT, marker[1]):
            try:
                yield axis, ast.literal_eval(text)
            except (ValueError, SyntaxError):
                continue  # pytest says what is wrong with it
