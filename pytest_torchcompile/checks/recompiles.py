"""recompiles: no more than the shapes of the cell's calls explain, or than the matrix allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, unjudged
from pytest_torchcompile.ledger.explain import other_reasons, recompile_advice
from pytest_torchcompile.ledger.records import Compile, compiled_unit
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK", "SHAPES", "explained_recompiles"]


def measure(run: CellTrial) -> dict[str, Any]:
    """Every recompile, and what the default limit is derived from: the sizes called and `dynamic`."""
    error = run.compiled.error
    calls = [dict(call.sizes) for call in run.calls]
    values = _values_of_dims(calls)
    return {
        "raised": error.type if error else None,
        "graphs": len(run.compiled.seen["graphs"]),
        "recompiles": run.compiled.seen["recompiles"],
        **_count_sizes(calls),
        "bound": values,
        "equal": _equal_to_others(run, values),
        "dynamic": run.cell.dynamic,
    }


def _count_sizes(calls: list[dict[str, int]]) -> dict[str, int]:
    """How many different sizes were called, and how many of them have a 0 or 1 in a dimension that varies."""
    distinct = {tuple(sizes.values()) for sizes in calls}
    # Torch makes a dimension dynamic once it was seen to vary, but 0 and 1 stay constants.
    columns = zip(*distinct, strict=True)
    varies = [len(set(column)) > 1 for column in columns]
    special = 0
    for sizes in distinct:
        special += any(size < 2 for size in compress(sizes, varies))
    return {"sizes": len(distinct), "special": special}


def _values_of_dims(calls: list[dict[str, int]]) -> dict[str, list[int]]:
    """Which values each dim had in the calls."""
    values: dict[str, set[int]] = {}
    for sizes in calls:
        for name, size in sizes.items():
            values.setdefault(name, set()).add(size)
    return {name: sorted(sizes) for name, sizes in values.items()}


def _equal_to_others(run: CellTrial, values: Mapping[str, list[int]]) -> dict[str, dict[str, str]]:
    """For each dim that varies: which of its sizes something else has too, and what that is."""
    equal: dict[str, dict[str, str]] = {}
    for name, sizes in values.items():
        if len(sizes) < 2:
            continue
        for owner, size in _other_sizes(run, name):
            if size in sizes:
                equal.setdefault(name, {}).setdefault(str(size), owner)
    return equal


def _other_sizes(run: CellTrial, dim: str) -> Iterator[tuple[str, int]]:
    """What else has a size: the other dims of the first call, whole numbers and parameters of modules, inputs."""
    sizes = dict(run.calls[0].sizes)
    for name, size in sizes.items():
        if name != dim:
            yield f"the dim {name}", size
    for path, module in run.pristine.named_modules():
        for name, value in vars(module).items():
            # Not isinstance: True and False are ints to Python, and no sizes.
            if type(value) is int:
                yield ".".join(filter(None, (path, name))), value
    for name, parameter in run.pristine.named_parameters():
        for size in parameter.shape:
            yield f"a size of {name}", size
    for tensor in run.calls[0].batch.tensors():
        for place, size in enumerate(tensor.shape):
            if size != sizes[dim]:
                yield f"size {place} of an input", size


def _dim_that_changed(recompile: Mapping[str, Any], values: Mapping[str, list[int]]) -> str:
    """The declared dim whose one value gave way to another, where a number recompiled; else empty.

    A model may be called with a dim itself, as an int: the length of a cache, a time step.
    """
    if recompile["cause"] != "value":
        return ""
    pair = {str(recompile.get("expected", "")), str(recompile.get("actual", ""))}
    if len(pair) != 2:
        return ""
    return next((name for name, sizes in values.items() if pair <= set(map(str, sizes))), "")


def explained_recompiles(dynamic: str, sizes: int, special: int = 0) -> int:
    """How many recompiles of one function the sizes explain.

    static: each further size is a new graph. auto: the second size makes the dimension dynamic, and that
    graph serves the rest. dynamic: one graph from the start. Torch never makes 0 and 1 dynamic, so in auto and
    dynamic each size with one (``special``) is a graph of its own.
    """
    ordinary = sizes - special
    graphs = {"static": sizes, "auto": min(2, ordinary) + special, "dynamic": min(1, ordinary) + special}[dynamic]
    return max(0, graphs - 1)


SHAPES = frozenset({"shape", "stride", "symbolic"})
"""Causes that new sizes explain; any other recompile needs a limit of its own in the matrix."""


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section.

    With a limit ``recompiles`` the cell's total must not exceed it. Without one, no single function may recompile more
    often than :func:`explained_recompiles`, or for another reason than a size, by more than the limit ``unexplained``
    (default 0).
    """
    if section["raised"]:
        yield from unjudged(section)
    elif not section["graphs"]:
        yield Problem("nothing to judge: no graph was compiled", hint="see the check `compiles` of this cell")
    elif "recompiles" in limits:
        yield from _judge_total(section, int(limits["recompiles"]))
    else:
        yield from _judge_unexplained(section, int(limits.get("unexplained", 0)))


def _judge_total(section: Mapping[str, Any], most: int) -> Iterator[Problem]:
    recompiles = section["recompiles"]
    if len(recompiles) > most:
        rule = f"- limits: {{recompiles: {len(recompiles)}}}"
        message = f"{len(recompiles)} recompile(s), {most} allowed"
        yield _recompile_problem(message, recompiles, recompiles[most], section, rule)


def _judge_unexplained(section: Mapping[str, Any], most: int) -> Iterator[Problem]:
    # Each function has a graph for each size, so the sizes explain as many recompiles of every one.
    functions = [_Function.read(recompiles, section) for recompiles in _by_function(section["recompiles"])]
    worst = max(functions, key=attrgetter("unexplained"), default=None)
    if worst is None or worst.unexplained <= most:
        return
    rule = f"- limits: {{unexplained: {worst.unexplained}}}"
    if not worst.other:
        allowed = explained_recompiles(section["dynamic"], section["sizes"], section.get("special", 0))
        message = (f"{len(worst.sized)} recompile(s), {allowed} explained by {section['sizes']} size(s) with "
                   f"dynamic={section['dynamic']}")
        yield _recompile_problem(message, worst.sized, worst.sized[allowed + most], section, rule)
        return
    # The first that is over the limit; where only those of sizes bring it over, the last one.
    culprit = worst.other[min(most, len(worst.other) - 1)]
    other = list(chain.from_iterable(function.other for function in functions))
    message = f"{len(other)} recompile(s) that no size explains"
    if more := worst.unexplained - len(worst.other):
        message += f", and {more} of {worst.other[0]['function']} more than its sizes do"
    yield _recompile_problem(message, other, culprit, section, rule)


@dataclass(frozen=True)
class _Function:
    """The recompiles of one function."""

    sized: list[Mapping[str, Any]]
    """Those that new sizes may explain."""
    other: list[Mapping[str, Any]]
    unexplained: int
    """All others, and those that are more than the sizes explain."""

    @classmethod
    def read(cls, recompiles: list[Mapping[str, Any]], section: Mapping[str, Any]) -> _Function:
        # Older reports do not say which values the dims had.
        values = section.get("bound", {})
        sized, other = [], []
        for recompile in recompiles:
            if recompile["cause"] in SHAPES or _dim_that_changed(recompile, values):
                sized.append(recompile)
            else:
                other.append(recompile)
        allowed = explained_recompiles(section["dynamic"], section["sizes"], section.get("special", 0))
        return cls(sized, other, len(other) + max(0, len(sized) - allowed))


def _by_function(recompiles: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    functions: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for recompile in recompiles:
        functions.setdefault(compiled_unit(recompile), []).append(recompile)
    return list(functions.values())


def _recompile_problem(message: str, recompiles: list[Mapping[str, Any]], culprit: Mapping[str, Any],
                       section: Mapping[str, Any], rule: str) -> Problem:
    """``culprit``: the first recompile that is not allowed; place and hint are its own."""
    hint = f"{_hint_for(culprit, section)}; if it is meant, allow it by the rule `{rule}`"
    return Problem(message, "\n".join(map(_recompile_line, recompiles)), hint, culprit["file"], culprit["line"])


def _hint_for(recompile: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    if name := _dim_that_changed(recompile, section.get("bound", {})):
        what = recompile.get("what") or "the number"
        return (f"{what} is the dim {name} itself: torch compiles each of its values apart where the model decides by "
                "it or asks for a Python number; pass it as a tensor")
    is_dynamic = section["dynamic"] == "dynamic"
    return _hint_of_equal_sizes(recompile, section) or recompile_advice(Compile.from_dict(dict(recompile)), is_dynamic)


def _hint_of_equal_sizes(recompile: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    """What to try where torch took a size for another one that was equal, and so made it no symbol."""
    if section["dynamic"] == "static" or recompile["cause"] not in SHAPES:
        return ""
    for name, equals in section.get("equal", {}).items():
        where = equals.get(str(recompile.get("expected", "")))
        if where is None:
            continue
        size = other = int(recompile["expected"])
        # The next size that nothing has: to name one is kinder than to say that there is one.
        while str(other) in equals:
            other += 1
        return (f"{name} was {size} when it was compiled, and so is {where}: torch takes equal sizes for one. Give "
                f"{name} a size that nothing else in the model has, such as {other}, at least in the first call")
    return ""


def _recompile_line(recompile: Mapping[str, Any]) -> str:
    line = f"{recompile['during']}: {recompile['function']} {recompile['file']}:{recompile['line']}"
    if at := recompile.get("resumed_at"):
        line += f", the rest after the graph break at line {at}"
    line += f"  {recompile['cause']}: {_change_of(recompile)}{_origin_of(recompile)}"
    if also := other_reasons(Compile.from_dict(dict(recompile))):
        line += f"; other cached entries: {also}"
    return line


def _change_of(recompile: Mapping[str, Any]) -> str:
    """What had another value than it was compiled for."""
    what, old, new = (recompile.get(key) for key in ("what", "expected", "actual"))
    if not what:
        return str(recompile["reason"])
    if recompile["cause"] == "type" and old and old == new:
        return f"{what}  {old} -> another class of the name {new}"
    return f"{what}  {old or '?'} -> {new or '?'}"


def _origin_of(recompile: Mapping[str, Any]) -> str:
    """Where a guard comes from that the code itself asked for, such as ``3*S < 256``."""
    if recompile["cause"] != "symbolic" or not recompile.get("source"):
        return ""
    origin = f", asked by `{recompile['source']}`"
    if recompile.get("at"):
        origin += f" at {recompile['at']}"
    return origin


CHECK = Check("recompiles", measure, judge)
