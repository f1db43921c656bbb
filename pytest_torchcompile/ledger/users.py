"""Which function of the user a frame or a compiled callable belongs to, behind torch's own wrappers.

First the work in progress that is asked about: a frame while Dynamo decides on it, a compiled callable while it runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pytest_torchcompile.ledger.break_sites import Frame, TracedCode, is_torch, read_code_name
from pytest_torchcompile.ledger.reasons import Reason
from pytest_torchcompile.ledger.records import EagerFrame, GraphBreak

__all__ = [
    "FrameAttempt", "FunctionPlace", "Functions", "Region", "code_of", "compiled_object", "compiled_parts",
    "is_disabled", "runs_later",
]


class FunctionPlace(NamedTuple):
    """A function of the user's, as records begin."""

    function: str
    file: str
    line: int


@dataclass
class FrameAttempt:
    """One frame that Dynamo was asked to compile, while it decides."""

    function: str = ""
    file: str = ""
    line: int = 0
    resumed_at: int = 0
    code: tuple[str, str] = ("", "")
    """File and name of the frame's own code, which may be a wrapper of torch's around the user's function."""
    frame_code: types.CodeType | None = None
    freevars: tuple[str, ...] = ()
    scope: Callable[[], Mapping[str, Any]] = dict
    """The frame's names and their values; ``G`` holds the globals. Looked up only if a guard has failed."""
    cached: bool = False
    """Whether a compiled entry was there already."""
    reasons: tuple[Reason, ...] = ()
    heard: bool = False
    """Whether any record of the structured trace came."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """``CompilationMetrics`` of torch's. Empty where the frame was refused before anything was traced."""
    specialised: dict[str, str] = field(default_factory=dict)
    """As :attr:`Compile.specialised`."""
    breaks: list[GraphBreak] = field(default_factory=list)
    """As entered in the ledgers, newest last."""
    caches: list[str] = field(default_factory=list)
    cache_keys: list[str] = field(default_factory=list)
    graphs: int = 0
    ops: int = 0

    begun: float = field(default_factory=time.perf_counter)

    @property
    def where(self) -> FunctionPlace:
        """The user's function."""
        return FunctionPlace(self.function, self.file, self.line)

    @property
    def traced(self) -> TracedCode:
        """What a graph break's text is read for."""
        function = Frame(self.file, self.line, self.function)
        lines: list[int] = []
        if self.frame_code is not None:
            # Instructions that Python adds have no line.
            lines = [line for _, _, line in self.frame_code.co_lines() if line]
        if not lines:
            return TracedCode(*self.code, function=function)
        return TracedCode(*self.code, min(lines), max(lines), function)


@dataclass(slots=True)
class Region:
    """One call of a compiled callable, while it runs. Made in every call, so it holds no more than it must."""

    frame: types.FrameType
    runs_before: int
    run_only: bool = False
    """Whether this is a call by ``torch._dynamo.run``."""
    entered: bool = False
    refrained: bool = False
    """Whether a frame inside was entered because torch was told not to compile it."""
    gave_up: tuple[EagerFrame, ...] = ()
    """Frames inside that ran eagerly, as entered in the ledgers."""
    quiet: tuple[EagerFrame, ...] = ()
    """Others that torch refused or found nothing in: no fault, unless no graph at all ran in the call."""

    @property
    def function(self) -> Any:
        """What is called: ``fn`` of ``compile_wrapper`` (torch/_dynamo/eval_frame.py, 2.8 to 2.15)."""
        return self.frame.f_locals.get("fn")

    @property
    def raised(self) -> bool:
        """Whether the call is ending with an exception of its own, not inside the handling of an earlier one."""
        error = sys.exc_info()[1]
        if error is None:
            return False
        # A call in an except block sees the exception that is handled there. Its traceback has no frame of the call.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame is not self.frame:
            trace = trace.tb_next
        return trace is not None


# ---------------------------------------------------------------------------------------------------------- whose it is
_BUILT_IN: Final = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType,
                    types.WrapperDescriptorType)  # fmt: skip

_WRAPPERS: Final = {
    "torch/_dynamo/external_utils.py": "fn",
    "torch/nn/modules/module.py": "self",
    "torch/_functorch/apis.py": "func",
}
"""Files with frames of torch's own around the user's function, and the name that this has there."""
_MOST_WRAPPERS: Final = 20
"""A guard against wrappers that go round in a circle."""


class Functions:
    """Names of functions, and which of them a resume function is the rest of."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], dict[int, str]] = {}
        """File and short name of functions, to their full names by first line."""

    def begin_attempt(self, frame: Any, cached: bool) -> FrameAttempt:
        """Begin the record of a frame (``DynamoFrameType``) that Dynamo is asked to compile."""
        code = frame.f_code
        place, resumed_at = self._place_of_frame(code, frame)

        def scope() -> dict[str, Any]:
            return {**frame.f_locals, "G": frame.f_globals}

        own_code = (code.co_filename, read_code_name(code.co_name).function)
        return FrameAttempt(*place, resumed_at, own_code, code, code.co_freevars, scope, cached)

    def _place_of_frame(self, code: Any, frame: Any) -> tuple[FunctionPlace, int]:
        if is_torch(code.co_filename):
            inner = _wrapped_by(code, frame)
            if inner is not None:
                return self.place_of(inner), 0
        return self._place_of_code(code, _owner_of_frame(code, frame))

    def place_of(self, function: Any) -> FunctionPlace:
        """Name, file and line of a compiled callable, as the user wrote it."""
        code = code_of(function)
        innermost = _innermost(function)
        if code is not None:
            return self._place_of_code(code, _receiver(innermost))[0]
        if isinstance(innermost, _BUILT_IN):
            return FunctionPlace(_builtin_name(innermost), "", 0)
        return FunctionPlace(type(innermost).__qualname__, "", 0)

    def name_of_code(self, code: Any) -> str:
        """Name of the function that a code object belongs to."""
        return self._place_of_code(code, None)[0].function

    def _place_of_code(self, code: Any, owner: object) -> tuple[FunctionPlace, int]:
        """The function of a code object, and the line where it resumes (0 for none)."""
        short, resumed_at = read_code_name(code.co_name)
        seen = self._seen.setdefault((code.co_filename, short), {})
        if resumed_at:
            # Torch gives a resume function the line of the break as its first. It is the rest of the last function of
            # that name that begins above it.
            line = max((known for known in seen if known <= resumed_at), default=code.co_firstlineno)
            return FunctionPlace(seen.get(line, short), code.co_filename, line), resumed_at
        name = read_code_name(_qualified_name(code, owner)).function
        seen[code.co_firstlineno] = name
        return FunctionPlace(name, code.co_filename, code.co_firstlineno), 0


def _qualified_name(code: Any, owner: object) -> str:
    # A decorator's "wrapper" around a forward tells nobody which module this is.
    if _is_forward(code, owner):
        return f"{type(owner).__qualname__}.forward"
    # Before Python 3.11 a code object does not know its class.
    if name := getattr(code, "co_qualname", ""):
        return str(name)
    if owner is None:
        return str(code.co_name)
    return f"{type(owner).__qualname__}.{code.co_name}"


def _builtin_name(builtin: Any) -> str:
    """``sin`` for ``_VariableFunctionsClass.sin``."""
    return str(builtin.__name__ if builtin.__qualname__.startswith("_") else builtin.__qualname__)


def _owner_of_frame(code: Any, frame: Any) -> Any:
    """The module whose code a frame runs: ``self``, or the first of ``*args`` of a decorator's function."""
    if code.co_varnames[:1] == ("self",):
        return frame.f_locals.get("self")
    if not code.co_argcount and code.co_flags & inspect.CO_VARARGS:
        # *args come after the keyword-only names.
        given = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount])
        if given and _is_known(given[0]):
            return given[0]
    return None


def _is_forward(code: Any, owner: object) -> bool:
    """Whether this is the code of a module's ``forward``, as its class has it."""
    import torch

    if not isinstance(owner, torch.nn.Module):
        return False
    forward = getattr(type(owner), "forward", None)
    return getattr(forward, "__code__", None) is code


def _receiver(function: Any) -> Any:
    """What the code of a callable gets as ``self``; None for a function, and for a method of a class."""
    if isinstance(function, types.FunctionType):
        return None
    receiver = function.__self__ if isinstance(function, types.MethodType) else function
    return None if isinstance(receiver, type) else receiver


def _wrapped_by(code: Any, frame: Any) -> Any:
    """What a frame of torch's own calls: ``fn`` of wrap_inline (external_utils.py), ``self`` of a module; or None."""
    name = ""
    for end, name_there in _WRAPPERS.items():
        if code.co_filename.endswith(end):
            name = name_there
    # wrap_inline holds it in its closure, and it may be any callable.
    if name in code.co_freevars:
        return frame.closure[code.co_freevars.index(name)].cell_contents
    inner = frame.f_locals.get(name)
    return inner if _is_known(inner) else None


def _is_known(function: Any) -> bool:
    """Whether attributes can be read without running code of the user's.

    Under compiled autograd a frame's arguments may be tracing proxies, which answer to any attribute.
    """
    import torch

    return isinstance(function, (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module))


def _attribute(function: Any, name: str) -> Any:
    """An attribute, found without asking a module's ``__getattr__``, which may be the user's."""
    import torch

    if not isinstance(function, torch.nn.Module):
        return getattr(function, name, None)
    own = vars(function)
    return own.get(name) or own.get("_modules", {}).get(name)


def _innermost(function: Any) -> Any:
    """The user's callable behind torch.compile, disable, functools.partial and wrappers of torch's own."""
    for _ in range(_MOST_WRAPPERS):
        if not _is_known(function):
            break
        inner = _attribute(function, "_torchdynamo_orig_callable") or _attribute(function, "_orig_mod")
        if inner is None and isinstance(function, functools.partial):
            inner = function.func
        # Only what torch wraps, like vmap: a decorator of the user's is compiled as it is.
        if inner is None and is_torch(getattr(getattr(function, "__code__", None), "co_filename", "")):
            inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


def _called_module(function: Any) -> Any:
    """The module whose call this is, or None."""
    import torch

    owner = function.__self__ if isinstance(function, types.MethodType) else function
    return owner if isinstance(owner, torch.nn.Module) else None


def _forward_of(module: Any) -> Any:
    """A module's ``forward``: that of the instance where somebody has set one, else that of its class."""
    return vars(module).get("forward") or type(module).forward


def compiled_object(function: Any) -> Any:
    """What a compiled callable is a call of: the user's module, or else the function itself."""
    inner = _innermost(function)
    module = _called_module(inner)
    # Compared with None: a container of modules may be empty, and false.
    return inner if module is None else module


def compiled_parts(model: Any) -> list[Any]:
    """What :func:`compiled_object` may say of compiled calls of a model: it and its modules, compiled by themselves."""
    whole = compiled_object(model)
    return list(whole.modules()) if hasattr(whole, "modules") else [whole]


def runs_later(function: Any) -> bool:
    """Whether a call only makes a coroutine, whose graphs run when that is awaited."""
    code = code_of(function)
    return code is not None and bool(code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def is_disabled(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` stands around a callable, or around a module's ``forward``."""
    module = _called_module(_innermost(function))
    if module is not None:
        function = _forward_of(module)
    return bool(_is_known(function) and _attribute(function, "_torchdynamo_disable"))


def code_of(function: Any) -> Any:
    """Code of a callable as the user wrote it; for a module that of its ``forward``. None for a builtin."""
    function = _innermost(function)
    module = _called_module(function)
    if module is not None:
        function = _innermost(_forward_of(module))
    elif not isinstance(function, (types.FunctionType, types.MethodType)):
        # An object with __call__, or a builtin.
        function = type(function).__call__
    return getattr(function, "__code__", None)
