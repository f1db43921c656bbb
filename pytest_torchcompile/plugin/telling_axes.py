"""Telling axes: what cells that fail for one cause have in common, in a few words.

The axes are those that the page's map puts first, found by the same function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from pytest_torchcompile.page.heatmap import order_axes

__all__ = ["telling_axes"]

_LEAST: Final = 0.2
"""Share of the variance from which axes tell something (omega squared)."""
_NO_RESULT: Final = ("not_run", "skip")
# An axis of many values is told by its worst ones.
_VALUES_SHOWN: Final = 3


def telling_axes(cells: Iterable[Mapping[str, Any]], failing: Collection[str]) -> str:
    """``backend inductor, dynamic auto or dynamic``; empty where axes do not tell which cells fail.

    ``cells``: of a report; ``failing``: the ids of those that have the cause.
    """
    judged = []
    for cell in cells:
        if cell["status"] not in _NO_RESULT:
            axes = {axis: str(value) for axis, value in cell["axes"].items()}
            judged.append((axes, cell["id"] in failing))
    order = order_axes(judged)
    if order.explained < _LEAST:
        return ""
    parts = []
    # The two that tell most together; one of them may tell nothing more than the other.
    for axis in order.axes[:2]:
        every = {axes.get(axis, "") for axes, _ in judged}
        bad = dict.fromkeys(axes.get(axis, "") for axes, fails in judged if fails)
        if len(bad) < len(every) and len(bad) <= _VALUES_SHOWN:
            parts.append(f"{axis} {' or '.join(bad)}")
    return ", ".join(parts)
