"""The ledger in words: each recompile, graph break and eager frame with culprit, evidence and what to try."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.reasons import classify_guard, read_reason
from pytest_torchcompile.ledger.records import (
    FAILED_GUARD,
    Compile,
    EagerFrame,
    GraphBreak,
    LedgerRecord,
    OverLimit,
)

__all__ = ["eager_frames", "functions_over_limit", "graph_breaks", "other_reasons", "recompile_advice", "recompiles"]

R = TypeVar("R", bound=LedgerRecord)
_UNKNOWN_LIMIT: Final = "TORCH_LOGS=recompiles names the guards that fail"
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
    records = _records_of(Compile, found)
    lines = [_allowed_header(len(records), "recompile", allowed)]
    for number, record in enumerate(records, 1):
        function = record.function
        if record.resumed_at:
            function += f", resumed at line {record.resumed_at}"
        lines.append(_entry_line(number, function, record))
        lines.append(f"     {record.cause}: {_changed_value(record)}")
        # Without it the line above is the guard itself.
        if record.what:
            place = f"  at {_short_path(record.at)}" if record.at else ""
            lines.append(f"     guard: {record.reason}{place}")
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
    # The first kind is that of the recompile itself.
    texts = []
    for first, *alike in list(kinds.values())[1:]:
        if alike:
            first += f" (and {len(alike)} like it)"
        texts.append(first)
    told = "; ".join(texts[:_MOST])
    if len(texts) > _MOST:
        told += f"; {len(texts) - _MOST} more"
    return told


def graph_breaks(found: Iterable[GraphBreak | Mapping[str, Any]], allowed: int = 0) -> str:
    """One paragraph for each place where a graph broke (a record or its dict): why, whose code, torch's hint.

    >>> print(graph_breaks([]))
    0 graph breaks, none allowed
    """
    records = _records_of(GraphBreak, found)
    lines = [_allowed_header(len(records), "graph break", allowed)]
    for number, record in enumerate(records, 1):
        lines.append(_entry_line(number, record.function, record, record.owner))
        gb_id = f"  [{record.gb_id}]" if record.gb_id else ""
        lines.append(f"     {record.reason}{gb_id}")
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
    records = _records_of(EagerFrame, found)
    lines = [f"{_counted_noun(len(records), 'function')} ran eagerly"]
    for number, record in enumerate(records, 1):
        lines.append(_entry_line(number, record.part, record))
        lines.append(f"     {record.kind}, {_counted_noun(record.calls, 'call')}: {record.reason}")
    return "\n".join(lines)


def _records_of(kind: type[R], found: Iterable[Any]) -> list[R]:
    records = []
    for record in found:
        if not isinstance(record, kind):
            record = kind.from_dict(dict(record))
        records.append(record)
    return records


def _counted_noun(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _allowed_header(count: int, noun: str, allowed: int) -> str:
    return f"{_counted_noun(count, noun)}, {allowed or 'none'} allowed"


def _entry_line(number: int, function: str, record: Compile | GraphBreak | EagerFrame, owner: str = "mine") -> str:
    parts = [function]
    if record.file:
        parts.append(f"{_short_path(record.file)}:{record.line}")
    if owner != "mine":
        parts.append(f"({owner})")
    if record.during:
        parts.append(f"during {record.during}")
    return f"  {number}. " + "  ".join(part for part in parts if part)


def _short_path(path: str) -> str:
    """A path as one types it: relative where it lies below the current folder."""
    return path.removeprefix(os.getcwd() + os.sep)


def _changed_value(record: Compile) -> str:
    if not record.what:
        return record.reason
    return f"{record.what}  {record.expected or '?'} -> {record.actual or '?'}"


_SIZE: Final = re.compile(r"^(?P<tensor>.+)\.size\((?P<dim>\d+)\)$")
_EQUAL_SIZES: Final = re.compile(r"\.size\(\)\[\d+\] == .*\.size\(\)\[\d+\]$")
_FIXED_SIZE: Final = re.compile(r"\.size\(\)\[\d+\].* == \d+$")
"""A guard that wants an expression of sizes to have one value, as a pooling layer's does."""
_COMPARISON: Final = re.compile(r"\b(?:if|elif|while|assert|min|max)\b|[=!]=")
_LOOP: Final = re.compile(r"\brange\(")
_NUMBER: Final = re.compile(r"-?\d+(\.\d*)?(e[+-]?\d+)?|nan|inf")
_LAST_RESORT: Final = "last, and discouraged: dynamic=True, which makes every size dynamic and often the code slower"


def recompile_advice(found: Compile, dynamic: bool = False) -> str:
    """What to try about a recompile: one line that fits its cause and names its own variables; never empty.

    :param dynamic: whether it was compiled with ``dynamic=True`` already.
    """
    text = _advice_by_cause(found)
    return text.removesuffix(f"; {_LAST_RESORT}") if dynamic else text


def functions_over_limit(seen: Ledger, earlier: Sequence[Compile] = ()) -> list[OverLimit]:
    """Functions that hit Dynamo's recompile limit, each with the guard of its last recompile and the remedy.

    :param seen: what was observed.
    :param earlier: recompiles of an observation before that one.
    """
    found = []
    for frame in seen.eager_frames:
        if frame.kind != "limit":
            continue
        place = frame.function, frame.file, frame.line
        given_up = *place, frame.resumed_at
        guard, what, at, advice = frame.reason.partition(FAILED_GUARD)[2], "", "", _UNKNOWN_LIMIT
        # The last one is the nearest to the call that was one too many.
        for record in (*earlier, *seen.recompiles):
            if (record.function, record.file, record.line, record.resumed_at) == given_up:
                guard, what, at = record.reason, record.what, record.at
                advice = recompile_advice(record)
        found.append(OverLimit(*place, guard, what, at, advice, frame.resumed_at))
    return found


def _advice_by_cause(found: Compile) -> str:
    if found.cause in _ADVICE_OF:
        return _ADVICE_OF[found.cause](found)
    if found.cause in _SIMPLE_ADVICE:
        return _SIMPLE_ADVICE[found.cause].format(
            name=_compared_name(found), attribute=found.what or "the attribute", state=found.what or "it",
            what=found.what, expected=found.expected, actual=found.actual,
        )  # fmt: skip
    return _advise_other(found)


def _compared_name(found: Compile) -> str:
    """The tensor or object that differed, as the user calls it."""
    what = re.sub(r"^type\((.*)\)$|^dispatch keys of (.*)$", r"\1\2", found.what)
    return re.sub(r"\.(size|stride)\(\d+\)$|\.(dim\(\)|dtype|device|requires_grad|training)$", "", what)


def _advise_shape(found: Compile) -> str:
    if "parameter" in found.advice:
        return f"resize {_compared_name(found)} before the first call, or force_parameter_static_shapes = False"
    # The rest of a function after a break gets what is made inside: its size comes from some input.
    if found.resumed_at:
        mark = _mark_call("it", "dim")
        return (f"pad the input that this size comes from to a few buckets (ShapeStabilizer); or {mark}; "
                f"without the graph break there would be one recompile less; {_LAST_RESORT}")  # fmt: skip
    # Torch kept this size open, and the code fixed it: marked as dynamic it raises ConstraintViolationError.
    if found.what in found.specialised:
        place = _short_path(found.specialised[found.what])
        # Where no line of the user's was running.
        if not place:
            return _fixed_by_torch("most likely an operator, its backward pass or the backend (torch names no line of "
                                   "yours)")
        return (f"the code makes a constant of this size at {place} (a loop over it, a dictionary, a comparison), so "
                "mark_dynamic would raise and dynamic=True changes nothing: write it with tensor operations, or pad "
                "to a few buckets (ShapeStabilizer, shape_buckets)")  # fmt: skip
    # Buckets come first, dynamic=True last: it traces 2 to 3 times as long, and every size becomes dynamic.
    if match := _SIZE.match(found.what):
        mark = _mark_call(match["tensor"], match["dim"])
        return f"pad to a few buckets (ShapeStabilizer, shape_buckets); or {mark}; {_LAST_RESORT}"
    return f"give {_compared_name(found) or 'the input'} the same number of dimensions in every call"


def _mark_call(tensor: str, dim: str) -> str:
    return f"torch._dynamo.mark_dynamic({tensor}, {dim}, min=2, max=your largest) before the first call"


def _advise_symbolic(found: Compile) -> str:
    if "duck" in found.advice or _EQUAL_SIZES.search(found.reason):
        return ("two sizes were equal in the first call: warm up with sizes that all differ, or set "
                "torch.fx.experimental._config.use_duck_shape = False")  # fmt: skip
    if "dynamo" in found.reason and "present" in found.reason:
        return "mark the same dimensions (mark_dynamic) in every call, from the first one on"
    # A dynamic size is at least 2 in torch: 0 broadcasts nothing, and 1 may broadcast.
    match = _SIZE.match(found.what)
    if match and found.reason.startswith("2 <=") and found.actual in ("0", "1"):
        return ("sizes 0 and 1 are always compiled apart: drop or pad the short batch, or "
                f"torch._dynamo.decorators.mark_unbacked({match['tensor']}, {match['dim']})")  # fmt: skip
    line = ""
    if found.source:
        place = f", {found.at}" if found.at else ""
        line = f" ({found.source}{place})"
    if _is_fixed(found):
        who = "most likely an operator or its backward pass (torch names no line)"
        if "cache.py" in found.at:
            who = ("most likely an operator or its backward pass (the graph is out of torch's cache, which names no "
                   "line; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 has torch name it)")
        if line:
            # A loop that is written out has as many turns as the size says.
            who = f"a loop of the code{line}" if _LOOP.search(found.source) else f"an operator of torch's{line}"
        return _fixed_by_torch(who)
    return f"the code decides by a size{line}: keep sizes on one side of it, or decide outside the model"


def _fixed_by_torch(who: str) -> str:
    return (f"{who} makes a constant of this size, so each value of it is compiled apart, and neither mark_dynamic nor "
            "dynamic=True helps: pad to a few buckets (ShapeStabilizer, shape_buckets), or allow a recompile for each "
            "size")  # fmt: skip


def _is_fixed(found: Compile) -> bool:
    """Whether an operator made a constant of a size, so that each other one is compiled apart."""
    # A remainder has two sides, all even sizes, say; and so has a comparison that somebody wrote.
    if "%" in found.reason or "Mod(" in found.reason or _COMPARISON.search(found.source):
        return False
    return _FIXED_SIZE.search(found.reason) is not None


def _advise_value(found: Compile) -> str:
    # An int on a module is a constant for Dynamo: a step counter recompiles in every step.
    if "integer attributes of the nn.Module" in found.advice:
        return (f"register {found.what} as a buffer (a tensor), or set "
                "torch._dynamo.config.allow_unspec_int_on_nn_module = True")  # fmt: skip
    if _NUMBER.fullmatch(found.expected):
        return f"pass {found.what or 'the number'} as a tensor, or keep it constant between calls"
    return f"keep {found.what or 'the value'} constant, or compile one callable for each value"


def _advise_type(found: Compile) -> str:
    # Two types of one name.
    if found.expected and found.expected == found.actual:
        return (f"{found.expected} is made anew for each module, as parametrize and class factories do: make the class "
                "once, or remove the parametrizations before compiling")
    return f"pass {_compared_name(found) or 'it'} as the same type in every call"


def _advise_closure(found: Compile) -> str:
    name = found.what.split(".")[0] or "it"
    return (f"make the function that holds {name} once and call that one again: functions of one code share "
            "a cache, unless compiled with isolate_recompiles=True")  # fmt: skip


def _advise_other(found: Compile) -> str:
    if found.reason.startswith("Duplicate") or " is " in found.reason:
        return "pass the same tensor twice in every call or in none: clone one of them"
    return found.advice or "TORCH_LOGS=recompiles_verbose lists every guard that failed"


_ADVICE_OF: Final[dict[str, Callable[[Compile], str]]] = {
    "shape": _advise_shape,
    "symbolic": _advise_symbolic,
    "value": _advise_value,
    "closure": _advise_closure,
    "type": _advise_type,
}
_SIMPLE_ADVICE: Final = {
    "stride": "call {name}.contiguous() before the model, in every call",
    "dtype": "cast {name} once before the model, or compile one callable for each dtype",
    "device": "move {name} to the model's device, or compile one callable for each device",
    "requires_grad": "detach {name}, or let it require gradients in every call",
    "attribute": "set {attribute} before the first call and keep it",
    "dict": "give the dict the same keys in every call ({what} was {expected}, is {actual})",
    "length": "keep {what} the same, or stack the items into one tensor",
    "none": "pass a tensor for {what} in every call (zeros serve), or compile two functions",
    "grad_mode": "warm up under the grad mode of later calls, or allow one compile for each mode",
    "autocast": "put autocast around the warm-up too, or inside the model",
    "training_mode": "call train() or eval() before the first call, or allow one compile for each",
    "global_state": "set {state} once, before the first call",
    "backward": "use the same saved-tensor hooks in every call, or none",
}
