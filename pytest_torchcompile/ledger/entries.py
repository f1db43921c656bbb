"""Cached entries of a function, and which of them a new call was nearest to. And the value that a failed guard met.

The value is read from the function's own arguments without running any user code. Torch names what a guard expected,
for most Python values not what came instead. It is looked up in the frame: names, attributes in ``__dict__``, items of
plain dicts, lists and tuples, `len` and `type`. A property, a ``__getattr__`` or a ``__getitem__`` of the user's is
never called; then the value stays unknown. Of guards on the process' global state the value is asked of torch
(:func:`changed_state`).
"""

from __future__ import annotations

import ast
import enum
import functools
import operator
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger.reasons import Reason, classify_guard

__all__ = [
    "actual_value", "cache_entries", "changed_state", "commonest_reason", "compiled_so_far", "count_differences",
    "guards_of", "nearest_reason", "shown_value",
]

_OTHER_BACKEND: Final = "BACKEND_MATCH"
"""The entry is that of a torch.compile with another backend or other options; no guard of the model's failed."""
_SUBJECT: Final = re.compile(r"\b[LG](?:\['[^']*'\]|\[-?\d+\]|\.\w+)+")
"""The local or global that a guard speaks of."""
_OF_SIZE: Final = re.compile(r"\.(size|stride|storage_offset)$")
_BARE_STATE: Final = "___check_global_state()"
_STATE: Final = re.compile(r" against | == |\(")


def cache_entries(code: types.CodeType) -> list[Any]:
    """Entries that torch holds for a code object (``_debug_get_cache_entry_list``, torch 2.8 to 2.15)."""
    import torch
    from torch._C._dynamo import eval_frame

    try:
        return list(eval_frame._debug_get_cache_entry_list(code))
    except AttributeError:
        raise InstrumentError(
            f"torch {torch.__version__} has no torch._C._dynamo.eval_frame._debug_get_cache_entry_list, which lists "
            "what is compiled; please report it with this version"
        ) from None


def compiled_so_far() -> int:
    """Graphs compiled since torch's counters were last cleared (``torch._dynamo.utils.counters``, torch 2.8 to 2.15).

    Does not load torch: where nobody has, nothing was compiled.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters.get("stats", {}).get("unique_graphs", 0)) if utils else 0


def guards_of(manager: Any) -> tuple[str, ...]:
    """All guards of an entry, as text (``GuardManagerWrapper.code_parts`` in torch/_dynamo/guards.py, seen in 2.13).

    Empty where torch has none: then the entry last used is taken for the nearest.
    """
    return tuple(getattr(manager, "code_parts", None) or ())


def nearest_reason(reasons: Sequence[Reason], new: Sequence[str], entries: Mapping[str, Sequence[str]]) -> Reason:
    """Of one failed guard for each cached entry, that of the entry with the fewest differences to the new one.

    Torch names the first guard of each entry that failed, of the entry last used first. That one may differ in
    more than the new call did: after calls with and without gradients, a new size fails against the entry without
    them because of the grad mode, though there is an entry with that mode, which fails because of the size.

    :param new: guards of the entry that was made for the call.
    :param entries: compile id to the guards of the entry.
    """
    nearest, fewest = Reason(""), -1
    for reason in reasons:
        if reason.guard.startswith(_OTHER_BACKEND):
            continue
        differences = _entry_distance(reason, entries.get(reason.entry, ()), new)
        # Of several that are equally near the first, which torch used last.
        if fewest < 0 or differences < fewest:
            nearest, fewest = reason, differences
    return nearest


def _entry_distance(reason: Reason, old: Sequence[str], new: Sequence[str]) -> int:
    """How many things an entry differs in."""
    differences = count_differences(old, new)
    # Torch 2.8 to 2.10 write the guard on the global state without its values, so both entries have the same text.
    # Without this a new size was told as a change of the grad mode.
    if reason.guard.startswith("GLOBAL_STATE changed") and _BARE_STATE in old:
        differences += 1
    return differences


def commonest_reason(reasons: Iterable[Reason]) -> Reason:
    """Of one failed guard for each cached entry, the first of the kind that there are most of."""
    kinds: Counter[tuple[str, str]] = Counter()
    first_of_kind: dict[tuple[str, str], Reason] = {}
    for reason in reasons:
        kind = (classify_guard(reason.guard), reason.what)
        kinds[kind] += 1
        first_of_kind.setdefault(kind, reason)
    if not kinds:
        return Reason("")
    # most_common keeps the order in which equals came.
    return first_of_kind[kinds.most_common(1)[0][0]]


def count_differences(old: Iterable[str], new: Iterable[str]) -> int:
    """How many things two sets of guards both speak of, and differently; a thing counts once.

    >>> old = ["L['k'] == 1", "check_tensor(L['x'], size=[3])"]
    >>> count_differences(old, ["L['k'] == 1", "check_tensor(L['x'], size=[4])"])
    1
    """
    before, now = _guards_by_subject(old), _guards_by_subject(new)
    return sum(before[subject] != now[subject] for subject in before.keys() & now.keys())


def _guards_by_subject(guards: Iterable[str]) -> dict[str, set[str]]:
    """What guards speak of, to the guards: a tensor with all of its sizes, a name, or a state of the process."""
    by_subject: dict[str, set[str]] = {}
    for guard in guards:
        if match := _SUBJECT.search(guard):
            subject = _OF_SIZE.sub("", match[0])
        else:
            subject = _STATE.split(guard, maxsplit=1)[0]
        by_subject.setdefault(subject, set()).add(guard)
    return by_subject


# ------------------------------------------------------------------------------------------- the value that a guard met
_UNKNOWN: Final = object()
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_BUILT_IN: Final = (types.MemberDescriptorType, types.GetSetDescriptorType)
"""Slots and C attributes: reading one runs no Python."""
_ARITHMETIC: Final = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_GET_ITEM: Final = (dict.__getitem__, list.__getitem__, tuple.__getitem__)
_LONGEST: Final = 60
_Keys: Final[type] = type({}.keys())


def actual_value(what: str, scope: Mapping[str, Any]) -> str:
    """Text of the value of an expression such as ``o.cfg['k'][0]`` in ``scope``; empty where unknown."""
    try:
        node = ast.parse(what, mode="eval").body
        value = _evaluate(node, scope)
    except (SyntaxError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return ""
    return shown_value(value)


def shown_value(value: object) -> str:
    """One short line for a value: itself where it is plain, else its type (and shape)."""
    text = _value_text(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _value_text(value: object) -> str:
    kind = type(value)
    # Before the plain values: members of an IntEnum are integers too.
    if isinstance(value, enum.Enum):
        return f"{kind.__name__}.{value._name_}"
    if isinstance(value, _PLAIN):
        return repr(value)
    # The very types only: a subclass may have a __len__ of the user's.
    if kind in (list, tuple, dict, set, frozenset):
        return f"{kind.__name__} of {len(value)}"  # type: ignore[arg-type]
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout"):
        return str(value)
    if isinstance(value, types.CodeType):
        return f"code {value.co_name} of line {value.co_firstlineno}"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"function {value.__qualname__}"
    # Only torch's own tensors are asked for a shape; that of a subclass may be the user's code.
    if kind.__module__.startswith("torch"):
        shape = getattr(value, "shape", None)
        if shape is not None:
            return f"{kind.__name__} of shape {tuple(shape)}"
    return kind.__name__


def _evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """The value of an expression, as far as it can be had without running code of the user's; else LookupError."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return scope[node.id]
    if isinstance(node, ast.Attribute):
        return _read_attribute(_evaluate(node.value, scope), node.attr)
    if isinstance(node, ast.Subscript):
        return _read_item(node, scope)
    if isinstance(node, ast.BinOp):
        return _calculate(node, scope)
    if isinstance(node, ast.Call):
        return _call_known(node, scope)
    raise LookupError(ast.dump(node))


def _read_item(node: ast.Subscript, scope: Mapping[str, Any]) -> Any:
    holder, key = _evaluate(node.value, scope), _evaluate(node.slice, scope)
    if type(holder).__getitem__ not in _GET_ITEM:  # the user's own
        raise LookupError(ast.dump(node))
    return holder[key]


def _calculate(node: ast.BinOp, scope: Mapping[str, Any]) -> Any:
    calculate = _ARITHMETIC.get(type(node.op))
    if calculate is not None:
        left, right = _evaluate(node.left, scope), _evaluate(node.right, scope)
        if type(left) is type(right) is int:
            return calculate(left, right)
    raise LookupError(ast.dump(node))


def _call_known(node: ast.Call, scope: Mapping[str, Any]) -> Any:
    """A call of one of the few functions that torch writes into guards."""
    if isinstance(node.func, ast.Attribute) and not node.args:
        holder = _evaluate(node.func.value, scope)
        if node.func.attr == "keys" and type(holder) is dict:
            return holder.keys()
        if node.func.attr in ("size", "stride", "dim") and type(holder).__module__.startswith("torch"):
            result = getattr(holder, node.func.attr)()
            # torch.Size shows as what it is, a tuple.
            return tuple(result) if isinstance(result, tuple) else result
    if ast.unparse(node.func) == "dict.keys":
        holder = _evaluate(node.args[0], scope)
        if type(holder) is dict:
            return holder.keys()
    if isinstance(node.func, ast.Name) and len(node.args) == 1:
        given = _evaluate(node.args[0], scope)
        if node.func.id == "list" and isinstance(given, _Keys):
            return list(given)  # type: ignore[call-overload]
        if node.func.id == "len" and isinstance(given, (dict, list, tuple, set, str)):
            return len(given)
        if node.func.id == "type":
            return type(given)
    raise LookupError(ast.dump(node))


def _read_attribute(holder: Any, name: str) -> Any:
    """An attribute, as ``getattr`` finds it where that runs no Python code."""
    try:
        own = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # built-in, or all in slots
        own = {}
    if name == "__dict__":
        return own
    if name in own:
        return own[name]
    # torch.nn.Module keeps these apart, and its __getattr__ may be overridden.
    for table in ("_modules", "_parameters", "_buffers"):
        if isinstance(own.get(table), dict) and name in own[table]:
            return own[table][name]
    for base in type(holder).__mro__:
        attribute = vars(base).get(name, _UNKNOWN)
        if isinstance(attribute, _BUILT_IN):
            return attribute.__get__(holder, type(holder))
        # Fields of a named tuple are properties written in C, which are no slots.
        if isinstance(holder, tuple) and name in getattr(base, "_fields", ()):
            return tuple.__getitem__(holder, base._fields.index(name))  # type: ignore[attr-defined]
        if attribute is not _UNKNOWN:
            if hasattr(type(attribute), "__get__"):
                break  # a property or a method: reading it may run code
            return attribute
    raise LookupError(name)


_STATE_NAMES: Final = re.compile(r"^GLOBAL_STATE changed: (.*)$")
_PLAINER: Final = {"allow_tf32": "float32_matmul_precision"}
"""What the user sets, where torch calls it otherwise."""


def _cpu_autocast() -> bool:
    import torch

    return torch.is_autocast_enabled("cpu")


def _cuda_autocast() -> bool:
    import torch

    return torch.is_autocast_enabled("cuda")


def _any_autocast() -> bool:
    return _cpu_autocast() or _cuda_autocast()


def _state_readers() -> dict[str, Callable[[], object]]:
    """Names as ``GlobalStateGuard::reason`` (torch/csrc/dynamo/guards.cpp) gives them, torch 2.8 to 2.15."""
    import torch

    return {
        "grad_mode": torch.is_grad_enabled,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "num_threads": torch.get_num_threads,
        "default_dtype": torch.get_default_dtype,
        "allow_tf32": torch.get_float32_matmul_precision,
        "autocast": _any_autocast,
        "autocast(cpu)_enabled": _cpu_autocast,
        "autocast(cuda)_enabled": _cuda_autocast,
        "autocast(cpu)_dtype": functools.partial(torch.get_autocast_dtype, "cpu"),
        "autocast(cuda)_dtype": functools.partial(torch.get_autocast_dtype, "cuda"),
    }


def changed_state(guard: str) -> tuple[str, str, str]:
    """What changed, what it was, what it is: empty texts where that is not known."""
    match = _STATE_NAMES.match(guard)
    if match is None:
        return "", "", ""
    names = match[1].split()
    readers = _state_readers()
    for name in names:
        if name in readers:
            now = readers[name]()
            # A switch was the opposite before. Of other values torch does not tell the old one.
            before = str(not now) if isinstance(now, bool) else ""
            return _PLAINER.get(name, name), before, str(now)
    return " ".join(names), "", ""
