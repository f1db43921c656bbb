"""The value that a failed guard met, read from the function's own arguments without running any user code.

Torch names what a guard expected, for most Python values not what came instead. It is looked up in the frame:
names, attributes in ``__dict__``, items of plain dicts, lists and tuples, `len` and `type`. A property, a
``__getattr__`` or a ``__getitem__`` of the user's is never called; then the value stays unknown.
"""

from __future__ import annotations

import ast
import enum
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
        value = _value(node, scope)
    except (SyntaxError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return ""
    return shown_value(value)


def shown_value(value: object) -> str:
    """One short line for a value: itself where it is plain, else its type (and shape)."""
    if isinstance(value, enum.Enum):
        text = f"{type(value).__name__}.{value._name_}"
    elif isinstance(value, _PLAIN):
        text = repr(value)
    elif type(value) in (list, tuple, dict, set, frozenset):
        text = f"{type(value).__name__} of {len(value)}"  # type: ignore[arg-type]
    elif type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "layout"):
        text = str(value)
    elif isinstance(value, types.CodeType):
        text = f"code {value.co_name} of line {value.co_firstlineno}"
    elif isinstance(value, type):
        text = value.__name__
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        text = f"function {value.__qualname__}"
    else:
        text = type(value).__name__
        shape = getattr(value, "shape", None) if type(value).__module__.startswith("torch") else None
        text += f" of shape {tuple(shape)}" if shape is not None else ""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return scope[node.id]
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, scope), node.attr)
    if isinstance(node, ast.Subscript):
        holder, key = _value(node.value, scope), _value(node.slice, scope)
        if type(holder).__getitem__ in _GET_ITEM:
            return holder[key]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _value(node.left, scope), _value(node.right, scope)
        if type(left) is type(right) is int:
            return _ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
        holder = _value(node.func.value, scope)
        if node.func.attr == "keys" and type(holder) is dict:
            return holder.keys()
        if node.func.attr in ("size", "stride", "dim") and type(holder).__module__.startswith("torch"):
            return tuple(found) if isinstance(found := getattr(holder, node.func.attr)(), tuple) else found
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.keys":
        holder = _value(node.args[0], scope)
        if type(holder) is dict:
            return holder.keys()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        inner = _value(node.args[0], scope)
        if node.func.id == "list" and isinstance(inner, _Keys):
            return list(inner)  # type: ignore[call-overload]
        if node.func.id == "len" and isinstance(inner, (dict, list, tuple, set, str)):
            return len(inner)
        if node.func.id == "type":
            return type(inner)
    raise LookupError(ast.dump(node))


def _attribute(holder: Any, name: str) -> Any:
    try:
        own = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # built-in, or all in slots
        own = {}
    if name == "__dict__":
        return own
    if name in own:
        return own[name]
    for held in ("_modules", "_parameters", "_buffers"):  # torch.nn.Module keeps them apart
        if isinstance(own.get(held), dict) and name in own[held]:
            return own[held][name]
    for base in type(holder).__mro__:
        found = vars(base).get(name, _UNKNOWN)
        if isinstance(found, _BUILT_IN):
            return found.__get__(holder, type(holder))
        if isinstance(holder, tuple) and name in getattr(base, "_fields", ()):
            return tuple.__getitem__(holder, base._fields.index(name))  # type: ignore[attr-defined]
        if found is not _UNKNOWN:
            if hasattr(type(found), "__get__"):
                break  # a property or a method: reading it may run code
            return found
    raise LookupError(name)


_NAMES: Final = re.compile(r"^GLOBAL_STATE changed: (.*)$")


_PLAINER: Final = {"allow_tf32": "float32_matmul_precision"}


def _readers() -> dict[str, Callable[[], object]]:
    """Names as ``GlobalStateGuard::reason`` (torch/csrc/dynamo/guards.cpp) gives them, torch 2.8 to 2.15."""
    import torch

    return {
        "grad_mode": torch.is_grad_enabled,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "num_threads": torch.get_num_threads,
        "default_dtype": torch.get_default_dtype,
        "allow_tf32": torch.get_float32_matmul_precision,
        "autocast": lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        "autocast(cpu)_enabled": lambda: torch.is_autocast_enabled("cpu"),
        "autocast(cuda)_enabled": lambda: torch.is_autocast_enabled("cuda"),
        "autocast(cpu)_dtype": lambda: torch.get_autocast_dtype("cpu"),
        "autocast(cuda)_dtype": lambda: torch.get_autocast_dtype("cuda"),
    }


def changed_state(guard: str) -> tuple[str, str, str]:
    """What changed, what it was, what it is: empty texts where that is not known.

    A switch was the opposite before; of other values torch does not tell the old one.
    """
    match = _NAMES.match(guard)
    if not match:
        return "", "", ""
    names = match[1].split()
    for name in names:
        if (read := _readers().get(name)) is not None:
            now = read()
            name = _PLAINER.get(name, name)
            return name, str(not now) if isinstance(now, bool) else "", str(now)
    return " ".join(names), "", ""
