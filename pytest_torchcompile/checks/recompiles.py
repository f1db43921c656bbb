"""recompiles: no more than the shapes of the cell's calls explain, or than the matrix allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.instruments.advice import advice
from pytest_torchcompile.instruments.explain import others
from pytest_torchcompile.instruments.records import Compile
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.runner import Run

__all__ = ["CHECK", "explained", "function_of"]


def measure(run: Run) -> dict[str, Any]:
    """Every recompile, and what the default limit is derived from: the sizes called and `dynamic`."""
    error = run.compiled.error
    return {
        "raised": error.type if error else None,
        "graphs": len(run.compiled.seen["graphs"]),
        "recompiles": run.compiled.seen["recompiles"],
        **_sizes([dict(call.sizes) for call in run.calls]),
        "bound": _bound([dict(call.sizes) for call in run.calls]),
        "dynamic": run.cell.dynamic,
    }


def _sizes(calls: list[dict[str, int]]) -> dict[str, int]:
    """How many different sizes were called, and how many of them have a 0 or 1 in a dimension that varies."""
    distinct = {tuple(sizes.values()) for sizes in calls}
    varying = [i for i, column in enumerate(zip(*distinct, strict=True)) if len(set(column)) > 1]
    return {"sizes": len(distinct), "special": sum(any(s[i] < 2 for i in varying) for s in distinct)}


def _bound(calls: list[dict[str, int]]) -> dict[str, list[int]]:
    """Which values each dim had in the calls."""
    found: dict[str, set[int]] = {}
    for sizes in calls:
        for name, size in sizes.items():
            found.setdefault(name, set()).add(size)
    return {name: sorted(sizes) for name, sizes in found.items()}


def dim_of(found: Mapping[str, Any], bound: Mapping[str, list[int]]) -> str:
    """The declared dim whose one value gave way to another, where a number recompiled; else empty.

    A model may be called with a dim itself, as an int: the length of a cache, a time step.
    """
    if found["cause"] != "value":
        return ""
    pair = {str(found.get("expected", "")), str(found.get("actual", ""))}
    if len(pair) != 2:
        return ""
    return next((name for name, sizes in bound.items() if pair <= set(map(str, sizes))), "")


def explained(dynamic: str, sizes: int, special: int = 0) -> int:
    """How many recompiles of one function the sizes explain.

    static: each further size is a new graph. auto: the second size makes the dimension dynamic, and that
    graph serves the rest. dynamic: one graph from the start. Torch never makes 0 and 1 dynamic, so in auto and
    dynamic each size with one (``special``) is a graph of its own.
    """
    ordinary = sizes - special
    graphs = {"static": sizes, "auto": min(2, ordinary) + special, "dynamic": min(1, ordinary) + special}[dynamic]
    return max(0, graphs - 1)


_NONE: Mapping[str, list[int]] = MappingProxyType({})
SHAPES = frozenset({"shape", "stride", "symbolic"})
"""Causes that new sizes explain; any other recompile needs a limit of its own in the matrix."""


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section.

    With a limit ``recompiles`` the cell's total must not exceed it. Without one, no single function may
    recompile more often than :func:`explained`.
    """
    if section["raised"] or not section["graphs"]:
        yield from unjudged(section) or [Problem("nothing to judge: no graph was compiled",
                                                 hint="see the check `compiles` of this cell")]
        return
    recompiles = section["recompiles"]
    bound = section.get("bound", {})  # older reports do not say
    other = [r for r in recompiles if r["cause"] not in SHAPES and not dim_of(r, bound)]
    if "recompiles" not in limits and other:
        yield _problem(f"{len(other)} recompile(s) that no size explains", other)
        return
    if "recompiles" in limits:
        most, count, over = limits["recompiles"], len(recompiles), recompiles
        allowed = f"{most:g} allowed"
    else:
        most = explained(section["dynamic"], section["sizes"], section.get("special", 0))
        by_function = Counter(map(function_of, recompiles))
        worst, count = by_function.most_common(1)[0] if by_function else (None, 0)
        over = [r for r in recompiles if function_of(r) == worst]
        allowed = f"{most} explained by {section['sizes']} size(s) with dynamic={section['dynamic']}"
    if count > most:
        yield _problem(f"{count} recompile(s), {allowed}", over, bound)


def _problem(message: str, found: list[Mapping[str, Any]], bound: Mapping[str, list[int]] = _NONE) -> Problem:
    first = found[0]
    return Problem(message, "\n".join(map(_line, found)), _hint(first, bound), first["file"], first["line"])


def _hint(found: Mapping[str, Any], bound: Mapping[str, list[int]]) -> str:
    if name := dim_of(found, bound):
        what = found.get("what") or "the number"
        return (f"{what} is the dim {name} itself: torch compiles each of its values apart where the model decides by "
                "it or asks for a Python number; pass it as a tensor")
    return advice(Compile.from_dict(dict(found)))


def function_of(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is compiled by itself: a function, or the rest of one after a graph break."""
    return found["file"], found["line"], found["function"], found.get("resumed_at", 0)


def _line(found: Mapping[str, Any]) -> str:
    rest = f", the rest after the graph break at line {at}" if (at := found.get("resumed_at")) else ""
    what, old, new = (found.get(key) for key in ("what", "expected", "actual"))
    why = f"{what}  {old or '?'} -> {new or '?'}" if what else found["reason"]
    also = f"; other cached entries: {also}" if (also := others(Compile.from_dict(dict(found)))) else ""
    return (f"{found['during']}: {found['function']} {found['file']}:{found['line']}{rest}  "
            f"{found['cause']}: {why}{also}")


CHECK = Check("recompiles", measure, judge)
