"""Skips: a skipped cell proves nothing, so a policy must allow it, and the gate says in which words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, Final

from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.plan.axes import value_key
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.testrecord import TEST_LANE

__all__ = ["skips"]

_PLAIN: Final = re.compile(r"[A-Za-z_][\w.+/-]*")
_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"})


def skips(cells: Sequence[JudgedCell], policy: Policy, noun: str = "cell") -> Iterator[Finding]:
    """A finding for each reason of skips that no entry of the policy allows, with the entry that would.

    ``noun``: what is skipped, ``cell`` or ``test``.
    """
    found: dict[str, list[JudgedCell]] = {}
    allowed = 0
    for cell in cells:
        reason = cell.skipped
        if reason is None:
            continue
        if any(entry.cells.covers(cell) and entry.contains in reason for entry in policy.allowed_skips):
            allowed += 1
        else:
            found.setdefault(reason, []).append(cell)
    if allowed:
        text = f"{count(allowed, f'skipped {noun} is', f'skipped {noun}s are')} allowed by {policy.path}"
        yield Finding("skip", "note", text)
    for reason, group in found.items():
        why = f": {reason}" if reason else ""
        were = "was" if len(group) == 1 else "were"
        text = f"{len(group)} of {count(len(cells), noun)} {were} skipped, and no policy allows it{why}"
        yield Finding("skip", "fail", text,
                      tuple(cell.id for cell in group), hint=_to_write(reason, group, cells, policy))


def _to_write(reason: str, group: Sequence[JudgedCell], cells: Sequence[JudgedCell], policy: Policy) -> str:
    """The policy's lines that would allow these skips."""
    if group[0].lane == TEST_LANE:
        selector = f"tests: {_listed([test.id for test in group])}"
    else:
        axes = ", ".join(f"{axis}: {_listed(values)}" for axis, values in _selector(group, cells).items())
        selector = f"cells: {{{axes}}}"
    head = f"if that is meant, write to {policy.path}:" if policy.path else \
        "if that is meant, write to a file, and give it by --policy:\n\nversion: 1"
    sep = "" if not policy.path else "\n"
    why = _quoted(reason or "why it may be skipped")
    return f"{head}{sep}\nallowed_skips:\n  - {selector}\n    reason: {why}"


def _selector(group: Sequence[JudgedCell], cells: Sequence[JudgedCell]) -> dict[str, list[Any]]:
    """The fewest axes whose values tell these cells from all others; all axes, if three do not."""
    wanted = {cell.id for cell in group}
    values = {axis: list({value_key(cell.axes[axis]): cell.axes[axis] for cell in group}.values())
              for axis in group[0].axes if all(axis in cell.axes for cell in group)}
    keys = {axis: {value_key(value) for value in there} for axis, there in values.items()}
    for size in (1, 2, 3):
        for axes in combinations(values, size):
            if all(cell.id in wanted for cell in cells
                   if all(axis in cell.axes and value_key(cell.axes[axis]) in keys[axis] for axis in axes)):
                return {axis: values[axis] for axis in axes}
    return values


def _listed(values: Sequence[Any]) -> str:
    quoted = [_quoted(value) for value in values]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _quoted(value: Any) -> str:
    """A scalar as YAML has it."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
