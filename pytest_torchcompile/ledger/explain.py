"""The ledger in words: each recompile, graph break and eager frame with culprit, evidence and what to try."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pytest_torchcompile.ledger.advice import advice
from pytest_torchcompile.ledger.guard_causes import classify
from pytest_torchcompile.ledger.reasons import read
from pytest_torchcompile.ledger.records import Compile, EagerFrame, GraphBreak, Record

__all__ = ["eager_frames", "graph_breaks", "others", "recompiles"]

R = TypeVar("R", bound=Record)
_MOST = 3
"""Kinds of reasons that are told."""


def recompiles(found: Iterable[Compile | Mapping[str, Any]], allowed: int = 0) -> str:
    """One paragraph for each recompile (a record or its dict): old -> new value, guard, place, what to try.

    >>> print(recompiles([Compile("f", "net.py", 3, "0/1", "recompile", "y == 'a'", "value", what="y",
    ...     expected="'a'", actual="'b'", during="call 2")]))
    1 recompile, none allowed
      1. f  net.py:3  during call 2
         value: y  'a' -> 'b'
         guard: y == 'a'
         try: keep y constant, or compile one callable for each value
    """
    records = _records(Compile, found)
    lines = [_header(len(records), "recompile", allowed)]
    for number, record in enumerate(records, 1):
        resumed = f", resumed at line {record.resumed_at}" if record.resumed_at else ""
        lines += _entry(number, f"{record.function}{resumed}", record.file, record.line, record.during)
        lines.append(f"     {record.cause}: {_change(record)}")
        if record.what:
            lines.append(f"     guard: {record.reason}" + (f"  at {_place(record.at)}" if record.at else ""))
        if record.source:
            lines.append(f"     code: {record.source}")
        if also := others(record):
            lines.append(f"     other cached entries: {also}")
        lines.append(f"     try: {advice(record)}")
    return "\n".join(lines)


def others(record: Compile) -> str:
    """Why the other cached entries did not fit, each kind of reason once; empty where for the same.

    >>> others(Compile("f", "net.py", 3, "0/2", "recompile", "k == 1", "value",
    ...     all_reasons=("y == 'a'", "k == 1", "k == 2", "y == 'b'", "y == 'c'")))
    "y == 'a' (and 2 like it)"
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for guard in (record.reason, *record.all_reasons):
        kinds.setdefault((classify(guard), read(guard).what), []).append(guard)
    texts = [first + (f" (and {len(more)} like it)" if more else "") for first, *more in list(kinds.values())[1:]]
    return "; ".join(texts[:_MOST]) + (f"; {len(texts) - _MOST} more" if len(texts) > _MOST else "")


def graph_breaks(found: Iterable[GraphBreak | Mapping[str, Any]], allowed: int = 0) -> str:
    """One paragraph for each place where a graph broke (a record or its dict): why, whose code, torch's hint.

    >>> print(graph_breaks([]))
    0 graph breaks, none allowed
    """
    records = _records(GraphBreak, found)
    lines = [_header(len(records), "graph break", allowed)]
    for number, record in enumerate(records, 1):
        lines += _entry(number, record.function, record.file, record.line, record.during, record.owner)
        lines.append(f"     {record.reason}" + (f"  [{record.gb_id}]" if record.gb_id else ""))
        if record.explanation:
            lines.append(f"     why: {record.explanation}")
        if record.whole_frame:
            lines.append(f"     torch cannot resume after it: all of {record.gave_up or record.function} runs eagerly")
        if record.hint:
            lines.append(f"     try: {record.hint}")
        if record.link:
            lines.append(f"     more: {record.link}")
    return "\n".join(lines)


def eager_frames(found: Iterable[EagerFrame | Mapping[str, Any]]) -> str:
    """One line for each function that ran eagerly though it was asked to compile (a record or its dict).

    >>> print(eager_frames([EagerFrame("f", "net.py", 3, "boom", "suppressed", calls=2)]))
    1 function ran eagerly
      1. f  net.py:3
         suppressed, 2 calls: boom
    """
    records = _records(EagerFrame, found)
    lines = [f"{len(records)} function{'' if len(records) == 1 else 's'} ran eagerly"]
    for number, record in enumerate(records, 1):
        calls = "1 call" if record.calls == 1 else f"{record.calls} calls"
        lines += _entry(number, record.function, record.file, record.line, record.during)
        lines.append(f"     {record.kind}, {calls}: {record.reason}")
    return "\n".join(lines)


def _records(kind: type[R], found: Iterable[Any]) -> list[R]:
    return [record if isinstance(record, kind) else kind.from_dict(dict(record)) for record in found]


def _header(count: int, name: str, allowed: int) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}, {allowed or 'none'} allowed"


def _entry(number: int, function: str, file: str, line: int, during: str, owner: str = "mine") -> list[str]:
    place = f"{_place(file)}:{line}" if file else ""
    parts = [function, place, "" if owner == "mine" else f"({owner})", f"during {during}" if during else ""]
    return [f"  {number}. " + "  ".join(part for part in parts if part)]


def _place(path: str) -> str:
    """A path as one types it: relative where it lies below the current folder."""
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path


def _change(record: Compile) -> str:
    if not record.what:
        return record.reason
    old, new = record.expected or "?", record.actual or "?"
    return f"{record.what}  {old} -> {new}"
