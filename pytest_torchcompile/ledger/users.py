"""Which function of the user a frame or a compiled callable belongs to, behind torch's own wrappers."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, Final

from pytest_torchcompile.ledger.in_progress import Attempt
from pytest_torchcompile.ledger.sites import is_torch, read_code_name

__all__ = ["Functions", "code_of", "compiled_object", "compiled_parts", "is_disabled", "runs_later"]

_BUILT_IN: Final = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType,
                    types.WrapperDescriptorType)  # fmt: skip

_WRAPPERS: Final = (("torch/_dynamo/external_utils.py", "fn"), ("torch/nn/modules/module.py", "self"),
                    ("torch/_functorch/apis.py", "func"))  # fmt: skip
"""Files with frames of torch's own around the user's function, and the name that this has there."""


class Functions:
    """Names of functions, and which of them a resume function is the rest of."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], dict[int, str]] = {}

    def attempt(self, frame: Any, cached: bool) -> Attempt:
        """Begin the record of a frame (``DynamoFrameType``) that Dynamo is asked to compile."""
        code = frame.f_code
        name, file, line, resumed_at = self._named(code, frame)
        return Attempt(
            name, file, line, resumed_at, (code.co_filename, read_code_name(code.co_name)[0]), code, code.co_freevars,
            lambda: {**frame.f_locals, "G": frame.f_globals}, cached,
        )

    def _named(self, code: Any, frame: Any) -> tuple[str, str, int, int]:
        if is_torch(code.co_filename) and (inner := _wrapped_by(code, frame)) is not None:
            return (*self.of_callable(inner), 0)
        return self._of_code(code, _owner(code, frame))

    def of_callable(self, function: Any) -> tuple[str, str, int]:
        """Name, file and line of a compiled callable, as the user wrote it."""
        code = code_of(function)
        if code is None:
            function = _innermost(function)
            return (_name(function) if isinstance(function, _BUILT_IN) else type(function).__qualname__), "", 0
        name, file, line, _ = self._of_code(code, _receiver(_innermost(function)))
        return name, file, line

    def of_code(self, code: Any) -> str:
        """Name of the function that a code object belongs to."""
        return self._of_code(code, None)[0]

    def _of_code(self, code: Any, owner: object) -> tuple[str, str, int, int]:
        short, resumed_at = read_code_name(code.co_name)
        seen = self._seen.setdefault((code.co_filename, short), {})
        if resumed_at:  # torch gives a resume function the line of the break as its first
            line = max((known for known in seen if known <= resumed_at), default=code.co_firstlineno)
            return seen.get(line, short), code.co_filename, line, resumed_at
        # Before Python 3.11 a code object does not know its class.
        name = getattr(code, "co_qualname", "") or f"{_class(owner)}{code.co_name}"
        if _is_forward(code, owner):  # a decorator's "wrapper" around it tells nobody which module this is
            name = f"{type(owner).__qualname__}.forward"
        seen[code.co_firstlineno] = read_code_name(name)[0]
        return seen[code.co_firstlineno], code.co_filename, code.co_firstlineno, 0


def _name(builtin: Any) -> str:
    """``sin`` for ``_VariableFunctionsClass.sin``."""
    return str(builtin.__name__ if builtin.__qualname__.startswith("_") else builtin.__qualname__)


def _owner(code: Any, frame: Any) -> Any:
    """The module whose code a frame runs: ``self``, or the first of ``*args`` of a decorator's function."""
    if code.co_varnames[:1] == ("self",):
        return frame.f_locals.get("self")
    if not code.co_argcount and code.co_flags & inspect.CO_VARARGS:
        given = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount])
        return given[0] if given and _is_known(given[0]) else None
    return None


def _is_forward(code: Any, owner: object) -> bool:
    """Whether this is the code of a module's ``forward``, as its class has it."""
    import torch

    forward = getattr(type(owner), "forward", None) if isinstance(owner, torch.nn.Module) else None
    return getattr(forward, "__code__", None) is code


def _class(owner: object) -> str:
    return "" if owner is None else f"{type(owner).__qualname__}."


def _receiver(function: Any) -> Any:
    """What the code of a callable gets as ``self``; None for a function, and for a method of a class."""
    if isinstance(function, types.FunctionType):
        return None
    receiver = function.__self__ if isinstance(function, types.MethodType) else function
    return None if isinstance(receiver, type) else receiver


def _wrapped_by(code: Any, frame: Any) -> Any:
    """What a frame of torch's own calls: ``fn`` of wrap_inline (external_utils.py), ``self`` of a module; or None."""
    name = next((name for end, name in _WRAPPERS if code.co_filename.endswith(end)), "")
    if name in code.co_freevars:  # wrap_inline's, which may be any callable
        return frame.closure[code.co_freevars.index(name)].cell_contents
    inner = frame.f_locals.get(name)
    return inner if _is_known(inner) else None


def _is_known(function: Any) -> bool:
    """Whether attributes can be read without running code of the user's (a tracing proxy answers everything)."""
    import torch

    return isinstance(function, (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module))


def _held(function: Any, name: str) -> Any:
    """An attribute, found without asking a module's ``__getattr__``, which may be the user's."""
    import torch

    if not isinstance(function, torch.nn.Module):
        return getattr(function, name, None)
    return vars(function).get(name) or vars(function).get("_modules", {}).get(name)


def _innermost(function: Any) -> Any:
    """The user's callable behind torch.compile, disable, functools.partial and wrappers of torch's own."""
    for _ in range(20):
        if not _is_known(function):
            break
        inner = _held(function, "_torchdynamo_orig_callable") or _held(function, "_orig_mod")
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

    owner = function.__self__ if isinstance(function, types.MethodType) else function
    return owner if isinstance(owner, torch.nn.Module) else None


def compiled_object(function: Any) -> Any:
    """What a compiled callable is a call of: the user's module, or else the function itself."""
    inner = _innermost(function)
    return inner if (module := _module(inner)) is None else module


def compiled_parts(model: Any) -> list[Any]:
    """What :func:`compiled_object` may say of compiled calls of a model: it and its modules, compiled by themselves."""
    owner = compiled_object(model)
    return list(owner.modules()) if hasattr(owner, "modules") else [owner]


def runs_later(function: Any) -> bool:
    """Whether a call only makes a coroutine, whose graphs run when that is awaited."""
    code = code_of(function)
    return code is not None and bool(code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def is_disabled(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` stands around a callable, or around a module's ``forward``."""
    if (module := _module(_innermost(function))) is not None:
        function = vars(module).get("forward") or type(module).forward
    return bool(_is_known(function) and _held(function, "_torchdynamo_disable"))


def code_of(function: Any) -> Any:
    """Code of a callable as the user wrote it; for a module that of its ``forward``. None for a builtin."""
    function = _innermost(function)
    if (module := _module(function)) is not None:
        function = _innermost(vars(module).get("forward") or type(module).forward)
    elif not isinstance(function, (types.FunctionType, types.MethodType)):
        function = type(function).__call__  # an object with __call__, or a builtin
    return getattr(function, "__code__", None)
