"""recompiles: no more than the shapes of the cell's calls explain, or than the matrix allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.ledger.explain import other_reasons, recompile_advice
from pytest_torchcompile.ledger.records import Compile, compiled_unit
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["CHECK", "explained"]


def measure(run: CellTrial) -> dict[str, Any]:
    """Every recompile, and what the default limit is derived from: the sizes called and `dynamic`."""
    error = run.compiled.error
    bound = _bound([dict(call.sizes) for call in run.calls])
    return {
        "raised": error.type if error else None,
        "graphs": len(run.compiled.seen["graphs"]),
        "recompiles": run.compiled.seen["recompiles"],
        **_sizes([dict(call.sizes) for call in run.calls]),
        "bound": bound,
        "equal": _equal(run, bound),
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


def _equal(run: CellTrial, bound: Mapping[str, list[int]]) -> dict[str, dict[str, str]]:
    """For each dim that varies: which of its sizes something else has too, and what that is."""
    found: dict[str, dict[str, str]] = {}
    for name, sizes in bound.items():
        if len(sizes) < 2:
            continue
        for owner, size in _other_sizes(run, name):
            if size in sizes:
                found.setdefault(name, {}).setdefault(str(size), owner)
    return found


def _other_sizes(run: CellTrial, dim: str) -> Iterator[tuple[str, int]]:
    """What else has a size: the other dims of the first call, whole numbers and parameters of modules, inputs."""
    sizes = dict(run.calls[0].sizes)
    for name, size in sizes.items():
        if name != dim:
            yield f"the dim {name}", size
    for path, module in run.pristine.named_modules():
        for name, value in vars(module).items():
            if type(value) is int:
                yield ".".join(filter(None, (path, name))), value
    for name, parameter in run.pristine.named_parameters():
        for size in parameter.shape:
            yield f"a size of {name}", size
    for tensor in run.calls[0].batch.tensors():
        for place, size in enumerate(tensor.shape):
            if size != sizes[dim]:
                yield f"size {place} of an input", size


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


SHAPES = frozenset({"shape", "stride", "symbolic"})
"""Causes that new sizes explain; any other recompile needs a limit of its own in the matrix."""


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section.

    With a limit ``recompiles`` the cell's total must not exceed it. Without one, no single function may recompile more
    often than :func:`explained`, or for another reason than a size, by more than the limit ``unexplained`` (default 0).
    """
    if section["raised"] or not section["graphs"]:
        yield from unjudged(section) or [Problem("nothing to judge: no graph was compiled",
                                                 hint="see the check `compiles` of this cell")]
        return
    recompiles = section["recompiles"]
    if "recompiles" in limits:
        most = int(limits["recompiles"])
        if len(recompiles) > most:
            paste = f"- limits: {{recompiles: {len(recompiles)}}}"
            yield _problem(f"{len(recompiles)} recompile(s), {most} allowed", recompiles, most, section, paste)
        return
    most = int(limits.get("unexplained", 0))
    functions = [_Function.of(found, section) for found in _by_function(recompiles)]
    worst = max(functions, key=lambda function: function.unexplained, default=None)
    if worst is None or worst.unexplained <= most:
        return
    paste = f"- limits: {{unexplained: {worst.unexplained}}}"
    other = [r for function in functions for r in function.other]
    if worst.other:
        over = most if len(worst.other) > most else len(worst.other) - 1
        culprit = other.index(worst.other[over])
        more = worst.unexplained - len(worst.other)
        also = f", and {more} of {worst.other[0]['function']} more than its sizes do" if more else ""
        yield _problem(f"{len(other)} recompile(s) that no size explains{also}", other, culprit, section, paste)
        return
    allowed = explained(section["dynamic"], section["sizes"], section.get("special", 0))
    sizes = f"{allowed} explained by {section['sizes']} size(s) with dynamic={section['dynamic']}"
    yield _problem(f"{len(worst.sized)} recompile(s), {sizes}", worst.sized, allowed + most, section, paste)


@dataclass(frozen=True)
class _Function:
    """The recompiles of one function."""

    sized: list[Mapping[str, Any]]
    """Those that new sizes may explain."""
    other: list[Mapping[str, Any]]
    unexplained: int
    """All others, and those that are more than the sizes explain."""

    @classmethod
    def of(cls, recompiles: list[Mapping[str, Any]], section: Mapping[str, Any]) -> _Function:
        bound = section.get("bound", {})  # older reports do not say
        sized = [r for r in recompiles if r["cause"] in SHAPES or dim_of(r, bound)]
        other = [r for r in recompiles if r not in sized]
        allowed = explained(section["dynamic"], section["sizes"], section.get("special", 0))
        return cls(sized, other, len(other) + max(0, len(sized) - allowed))


def _by_function(recompiles: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for recompile in recompiles:
        found.setdefault(compiled_unit(recompile), []).append(recompile)
    return list(found.values())


def _problem(message: str, found: list[Mapping[str, Any]], over: int, section: Mapping[str, Any],
             paste: str) -> Problem:
    """``over``: the first recompile that is not allowed; place and hint are its own."""
    culprit = found[over]
    hint = f"{_hint(culprit, section)}; if it is meant, allow it by the rule `{paste}`"
    return Problem(message, "\n".join(map(_line, found)), hint, culprit["file"], culprit["line"])


def _hint(found: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    if name := dim_of(found, section.get("bound", {})):
        what = found.get("what") or "the number"
        return (f"{what} is the dim {name} itself: torch compiles each of its values apart where the model decides by "
                "it or asks for a Python number; pass it as a tensor")
    record, dynamic = Compile.from_dict(dict(found)), section["dynamic"] == "dynamic"
    return _equal_sizes(found, section) or recompile_advice(record, dynamic)


def _equal_sizes(found: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    """What to try where torch took a size for another one that was equal, and so made it no symbol."""
    if section["dynamic"] == "static" or found["cause"] not in SHAPES:
        return ""
    for name, equals in section.get("equal", {}).items():
        where = equals.get(str(found.get("expected", "")))
        if where is None:
            continue
        size = int(found["expected"])
        other = next(n for n in range(size + 1, size + len(equals) + 2) if str(n) not in equals)
        return (f"{name} was {size} when it was compiled, and so is {where}: torch takes equal sizes for one. Give "
                f"{name} a size that nothing else in the model has, such as {other}, at least in the first call")
    return ""


def _line(found: Mapping[str, Any]) -> str:
    rest = f", the rest after the graph break at line {at}" if (at := found.get("resumed_at")) else ""
    what, old, new = (found.get(key) for key in ("what", "expected", "actual"))
    why = f"{what}  {old or '?'} -> {new or '?'}" if what else found["reason"]
    if found["cause"] == "type" and what and old and old == new:
        why = f"{what}  {old} -> another class of the name {new}"
    also = f"; other cached entries: {also}" if (also := other_reasons(Compile.from_dict(dict(found)))) else ""
    return (f"{found['during']}: {found['function']} {found['file']}:{found['line']}{rest}  "
            f"{found['cause']}: {why}{_origin(found)}{also}")


def _origin(found: Mapping[str, Any]) -> str:
    """Where a guard comes from that the code itself asked for, such as ``3*S < 256``."""
    if found["cause"] != "symbolic" or not found.get("source"):
        return ""
    at = f" at {found['at']}" if found.get("at") else ""
    return f", asked by `{found['source']}`{at}"


CHECK = Check("recompiles", measure, judge)
