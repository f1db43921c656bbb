"""Which function of the user a frame or a compiled callable belongs to, behind torch's own wrappers."""

from __future__ import annotations

import functools
from typing import Any

from pytest_torchcompile.instruments.attempts import Attempt
from pytest_torchcompile.instruments.sites import is_torch, readable

__all__ = ["attempt", "code_of", "of_callable"]


def _of_code(code: Any, owner: object = None) -> tuple[str, str, int, int]:
    name = getattr(code, "co_qualname", "") or _qualified(code.co_name, owner)
    function, resumed_at = readable(name)
    return function, code.co_filename, code.co_firstlineno, resumed_at


def _qualified(name: str, owner: object) -> str:
    """Name with its class in front: before Python 3.11 a code object does not know it."""
    if owner is None or name.startswith("torch_dynamo_"):
        return name
    return f"{type(owner).__qualname__}.{name}"


def _innermost(function: Any) -> Any:
    """The user's callable behind torch.compile, disable, functools.partial and wrappers of torch's own."""
    for _ in range(20):
        inner = getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "_orig_mod", None)
        if inner is None and isinstance(function, functools.partial):
            inner = function.func
        if inner is None and is_torch(getattr(getattr(function, "__code__", None), "co_filename", "")):
            inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


def _module(function: Any) -> Any:
    """The module whose call this is, or None."""
    import torch

    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def code_of(function: Any) -> Any:
    """Code of a callable as the user wrote it; for a module that of its ``forward``. None for a builtin."""
    function = _innermost(function)
    if (module := _module(function)) is not None:
        function = _innermost(vars(module).get("forward") or type(module).forward)
    elif not hasattr(function, "__code__"):
        function = type(function).__call__  # an object with __call__, or a builtin
    return getattr(function, "__code__", None)


def of_callable(function: Any) -> tuple[str, str, int]:
    """Name, file and line of a compiled callable, as the user wrote it."""
    code = code_of(function)
    if code is None:
        return getattr(function, "__qualname__", type(function).__qualname__), "", 0
    name, file, line, _ = _of_code(code, _module(_innermost(function)))
    return name, file, line


def attempt(frame: Any, *, cached: bool) -> Attempt:
    """Begin the record of a frame that Dynamo is asked to compile (``DynamoFrameType``: code and locals)."""
    code = frame.f_code
    if not is_torch(code.co_filename):
        owner = None
        if code.co_varnames[:1] == ("self",) and not hasattr(code, "co_qualname"):
            owner = frame.f_locals.get("self")
        return Attempt(*_of_code(code, owner), cached=cached)
    # A frame of torch's own around the user's function: wrap_inline (external_utils.py), Module._call_impl.
    for name in ("fn", "self"):
        inner = frame.f_locals.get(name)
        if inner is None and name in code.co_freevars:
            inner = frame.closure[code.co_freevars.index(name)].cell_contents
        if callable(inner):
            return Attempt(*of_callable(inner), cached=cached)
    return Attempt(*_of_code(code), cached=cached)
