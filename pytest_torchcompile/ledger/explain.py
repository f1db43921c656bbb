"""The ledger in words: each recompile, graph break and eager frame with culprit, evidence and what to try."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from pytest_torchcompile.ledger.guard_causes import classify_guard
from pytest_torchcompile.ledger.reasons import read_reason
from pytest_torchcompile.ledger.records import Compile, EagerFrame, GraphBreak, Record

__all__ = ["eager_frames", "graph_breaks", "other_reasons", "recompile_advice", "recompiles"]

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
        if also := other_reasons(record):
            lines.append(f"     other cached entries: {also}")
        lines.append(f"     try: {recompile_advice(record)}")
    return "\n".join(lines)


def other_reasons(record: Compile) -> str:
    """Why the other cached entries did not fit, each kind of reason once; empty where for the same.

    >>> other_reasons(Compile("f", "net.py", 3, "0/2", "recompile", "k == 1", "value",
    ...     all_reasons=("y == 'a'", "k == 1", "k == 2", "y == 'b'", "y == 'c'")))
    "y == 'a' (and 2 like it)"
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for guard in (record.reason, *record.all_reasons):
        kinds.setdefault((classify_guard(guard), read_reason(guard).what), []).append(guard)
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


_SIZE: Final = re.compile(r"^(?P<tensor>.+)\.size\((?P<dim>\d+)\)$")


_LAST_RESORT: Final = "last, and discouraged: dynamic=True, which makes every size dynamic and often the code slower"


def recompile_advice(found: Compile, dynamic: bool = False) -> str:
    """What to try; never empty. ``dynamic``: whether it was compiled with ``dynamic=True`` already."""
    text = _BY_CAUSE.get(found.cause, _other)(found)
    return text.removesuffix(f"; {_LAST_RESORT}") if dynamic else text


def _name(found: Compile) -> str:
    """The tensor or object that differed, as the user calls it."""
    what = re.sub(r"^type\((.*)\)$|^dispatch keys of (.*)$", r"\1\2", found.what)
    return re.sub(r"\.(size|stride)\(\d+\)$|\.(dim\(\)|dtype|device|requires_grad|training)$", "", what)


def _shape(found: Compile) -> str:
    if "parameter" in found.advice:
        return f"resize {_name(found)} before the first call, or force_parameter_static_shapes = False"
    if found.resumed_at:  # what the rest of a function is given is made inside
        return (f"pad the input that this size comes from to a few buckets (ShapeStabilizer); or {_mark('it', 'dim')}; "
                f"without the graph break there would be one recompile less; {_LAST_RESORT}")  # fmt: skip
    if match := _SIZE.match(found.what):
        mark = _mark(match["tensor"], match["dim"])
        return f"pad to a few buckets (ShapeStabilizer, shape_buckets); or {mark}; {_LAST_RESORT}"
    return f"give {_name(found) or 'the input'} the same number of dimensions in every call"


def _mark(tensor: str, dim: str) -> str:
    return f"torch._dynamo.mark_dynamic({tensor}, {dim}, min=2, max=your largest) before the first call"


def _symbolic(found: Compile) -> str:
    if "duck" in found.advice or re.search(r"\.size\(\)\[\d+\] == .*\.size\(\)\[\d+\]$", found.reason):
        return ("two sizes were equal in the first call: warm up with sizes that all differ, or set "
                "torch.fx.experimental._config.use_duck_shape = False")  # fmt: skip
    if "dynamo" in found.reason and "present" in found.reason:
        return "mark the same dimensions (mark_dynamic) in every call, from the first one on"
    if (match := _SIZE.match(found.what)) and found.reason.startswith("2 <=") and found.actual in ("0", "1"):
        return ("sizes 0 and 1 are always compiled apart: drop or pad the short batch, or "
                f"torch._dynamo.decorators.mark_unbacked({match['tensor']}, {match['dim']})")  # fmt: skip
    place = f", {found.at}" if found.at else ""
    line = f" ({found.source}{place})" if found.source else ""
    return f"the code decides by a size{line}: keep sizes on one side of it, or decide outside the model"


def _value(found: Compile) -> str:
    if "integer attributes of the nn.Module" in found.advice:
        return (f"register {found.what} as a buffer (a tensor), or set "
                "torch._dynamo.config.allow_unspec_int_on_nn_module = True")  # fmt: skip
    if re.fullmatch(r"-?\d+(\.\d*)?(e[+-]?\d+)?|nan|inf", found.expected):
        return f"pass {found.what or 'the number'} as a tensor, or keep it constant between calls"
    return f"keep {found.what or 'the value'} constant, or compile one callable for each value"


def _type(found: Compile) -> str:
    if found.expected and found.expected == found.actual:
        return (f"{found.expected} is made anew for each module, as parametrize and class factories do: make the class "
                "once, or remove the parametrizations before compiling")
    return f"pass {_name(found) or 'it'} as the same type in every call"


def _closure(found: Compile) -> str:
    name = found.what.split(".")[0] or "it"
    return (f"make the function that holds {name} once and call that one again: functions of one code share "
            "a cache, unless compiled with isolate_recompiles=True")  # fmt: skip


def _other(found: Compile) -> str:
    if found.reason.startswith("Duplicate") or " is " in found.reason:
        return "pass the same tensor twice in every call or in none: clone one of them"
    return found.advice or "TORCH_LOGS=recompiles_verbose lists every guard that failed"


_BY_CAUSE: Final[dict[str, Callable[[Compile], str]]] = {
    "shape": _shape,
    "symbolic": _symbolic,
    "value": _value,
    "closure": _closure,
    "stride": lambda r: f"call {_name(r)}.contiguous() before the model, in every call",
    "dtype": lambda r: f"cast {_name(r)} once before the model, or compile one callable for each dtype",
    "device": lambda r: f"move {_name(r)} to the model's device, or compile one callable for each device",
    "requires_grad": lambda r: f"detach {_name(r)}, or let it require gradients in every call",
    "type": _type,
    "attribute": lambda r: f"set {r.what or 'the attribute'} before the first call and keep it",
    "dict": lambda r: f"give the dict the same keys in every call ({r.what} was {r.expected}, is {r.actual})",
    "length": lambda r: f"keep {r.what} the same, or stack the items into one tensor",
    "none": lambda r: f"pass a tensor for {r.what} in every call (zeros serve), or compile two functions",
    "grad_mode": lambda r: "warm up under the grad mode of later calls, or allow one compile for each mode",
    "autocast": lambda r: "put autocast around the warm-up too, or inside the model",
    "training_mode": lambda r: "call train() or eval() before the first call, or allow one compile for each",
    "global_state": lambda r: f"set {r.what or 'it'} once, before the first call",
    "backward": lambda r: "use the same saved-tensor hooks in every call, or none",
}
