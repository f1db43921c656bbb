"""Sizes that code made constants of while torch had them open: marking such a size as dynamic changes nothing.

A loop over a size, or a dictionary that is asked with one, fixes it. Torch says so in its structured trace, by the
event ``symbolic_shape_specialization`` (torch/fx/experimental/symbolic_shapes.py, seen in torch 2.13). A torch that
does not say it leaves the records as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_torchcompile.ledger.break_sites import is_torch
from pytest_torchcompile.ledger.reasons import user_expression

__all__ = ["specialised_sizes"]


def specialised_sizes(event: Mapping[str, Any]) -> dict[str, str]:
    """Each size that the event is about, as its author would write it, to ``file:line``; empty where nobody knows.

    >>> specialised_sizes({"sources": ["L['x'].size()[0]"], "user_stack": None})
    {'x.size(0)': ''}
    """
    stack = event.get("user_stack")
    place = _innermost_place(stack) if stack else ""
    return {_size_name(str(source)): place for source in event.get("sources") or ()}


def _size_name(source: str) -> str:
    name = source
    # Guards that failed are written without the table of local names.
    if name.startswith("L['"):
        name = name[3:].replace("']", "", 1)
    return user_expression(name)


def _innermost_place(stack: Iterable[Mapping[str, Any]]) -> str:
    """Where the user's own code was."""
    files = _interned_files()
    place = ""
    for frame in stack:
        file = files.get(frame.get("filename", -1), "")
        if file and not is_torch(file):
            place = f"{file}:{frame.get('line', 0)}"
    return place


def _interned_files() -> dict[int, str]:
    """Files by the numbers that the trace has for them (``torch._logging.structured.INTERN_TABLE``, torch 2.13)."""
    from torch._logging import structured

    table = getattr(structured, "INTERN_TABLE", {})
    return {number: name for name, number in table.items()}
