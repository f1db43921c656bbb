"""The value that a failed guard met, read from the function's own arguments without running any user code.

Torch names what a guard expected, for most Python values not what came instead. It is looked up in the frame:
names, attributes in ``__dict__``, items of plain dicts, lists and tuples, `len` and `type`. A property, a
``__getattr__`` or a ``__getitem__`` of the user's is never called; then the value stays unknown.

Of guards on the process' global state the value is asked of torch (:func:`changed_state`).
"""

from __future__ import annotations

import ast
import enum
import functools
import operator
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["actual_value", "changed_state", "shown_value"]

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
