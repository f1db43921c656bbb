"""Frames that torch refuses before it looks into them: by their file, their kind, or for want of a tensor.

Most are plumbing (``_call_impl``, context managers, loggers). Work to do have two kinds, which nothing else shows:
modules of torch's own that no caller's graph took in, and functions that hold their tensors where torch does not look.
"""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger.break_sites import code_owner, is_torch
from pytest_torchcompile.ledger.records import EagerFrame
from pytest_torchcompile.ledger.users import FrameAttempt, Region

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch

__all__ = ["IN_PLACE", "is_in_place", "refused_frame", "why_never_seen"]

IN_PLACE: Final = ("torch does not compile modules of its own in place, by module.compile(); "
                   "torch.compile(module) does")  # fmt: skip
"""Seen up to torch 2.13. Torch 2.14 and 2.15 compile them, and then nothing of this is entered."""
_WORKING_MODULES: Final = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\](?!module\.py|container\.py)\w+\.py$")
"""Files with modules of torch's own that have work to do; a container's is that of its children."""
_NO_TENSOR: Final = "no tensor-related objects found in frame"
"""torch/_dynamo/convert_frame.py, seen in torch 2.13; 2.8 to 2.10 say nothing."""
_CALLBACK: Final = "torch/_dynamo/convert_frame.py"
"""The file that our own hook pretends to be of (:mod:`.frames`): what is further out is not ours."""
_MOST_OBJECTS: Final = 1000
"""Objects looked at in search of a tensor: a data set may hang on an argument."""
_GENERATOR: Final = "torch does not compile a generator by itself, only as part of a caller's graph"
_COROUTINE: Final = "before Python 3.11 torch is not asked about a coroutine"


def is_in_place(function: object) -> bool:
    """Whether a compiled callable is what ``module.compile()`` compiles (torch/nn/modules/module.py, seen in 2.13)."""
    return isinstance(function, types.MethodType) and function.__name__ == "_call_impl"


def why_never_seen(code: types.CodeType | None) -> str:
    """Why Dynamo is not asked about a function before Python 3.11: its body first runs after the call; else ''."""
    if code is None or sys.version_info >= (3, 11):
        return ""
    if code.co_flags & inspect.CO_GENERATOR:
        return _GENERATOR
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return _COROUTINE
    return ""


def refused_frame(watch: LedgerWatch, attempt: FrameAttempt, reason: str) -> tuple[EagerFrame, bool] | None:
    """The record of a frame that was refused, and whether it is to be entered whatever else the call does."""
    from torch._dynamo import config

    # Told for the whole call, when it ends.
    if config.disable:
        return None
    region = watch.thread.regions[-1] if watch.thread.regions else None
    if "disabled for this frame" in reason:
        return EagerFrame(*attempt.where, reason, "disabled"), True
    if region and attempt.code[1] == "forward" and _WORKING_MODULES.search(attempt.code[0]):
        if attempt.function == "Identity.forward":
            return EagerFrame(*attempt.where, "it has nothing to compile", "empty"), False
        return _loud(_refused_module(watch, attempt, region))
    # Any other frame of torch's own is plumbing.
    if attempt.code[0] != attempt.file:
        return None
    is_generator = bool(attempt.frame_code and attempt.frame_code.co_flags & inspect.CO_GENERATOR)
    # Where torch says nothing (2.8 to 2.10), a generator is told by its code.
    if reason == _NO_TENSOR or (not reason and not is_generator):
        if region and _is_asked_for(attempt, region) and _holds_hidden_tensor(attempt):
            return _loud(_function_with_hidden_tensor(watch, attempt, region))
        if not reason:
            return None
        return EagerFrame(*attempt.where, reason, "empty"), False
    if is_generator:
        reason = _GENERATOR
    return EagerFrame(*attempt.where, reason, "skipped"), False


def _loud(eager: EagerFrame | None) -> tuple[EagerFrame, bool] | None:
    if eager is None:
        return None
    return eager, True


def _refused_module(watch: LedgerWatch, attempt: FrameAttempt, region: Region) -> EagerFrame | None:
    """A module of torch's own that runs by itself."""
    asked = watch.place_of(region)
    if is_in_place(region.function) and is_torch(asked.file):
        # Once for a call, in the name of the module that was compiled, not of each of its parts.
        if region.gave_up:
            return None
        return EagerFrame(*asked, IN_PLACE, "skipped")
    kind = _kind_of_refusal(watch, region)
    text = "torch compiles its own modules only as part of a caller's graph, and "
    text += "a graph break took this one out" if kind == "graph_break" else "here it was called from none"
    for frame in _callers(region):
        file = frame.f_code.co_filename
        if not is_torch(file):
            text += f", at {os.path.basename(file)}:{frame.f_lineno}"
            break
    return _unless_inside(watch, region, EagerFrame(*attempt.where, text, kind))


def _function_with_hidden_tensor(watch: LedgerWatch, attempt: FrameAttempt, region: Region) -> EagerFrame | None:
    """A function that has work to do, and whose tensors lie in attributes of its arguments."""
    part = f"the rest after line {attempt.resumed_at}" if attempt.resumed_at else "the call"
    text = f"{part} ran eagerly: torch saw no tensor among its arguments, and does not look into objects"
    return _unless_inside(watch, region, EagerFrame(*attempt.where, text, _kind_of_refusal(watch, region)))


def _is_asked_for(attempt: FrameAttempt, region: Region) -> bool:
    """Whether a frame is the user's (or a library's) and called from there, and no plumbing of torch's or Python's."""
    caller = next(_callers(region), None)
    files = [attempt.file]
    if caller is not None:
        files.append(caller.f_code.co_filename)
    return all(code_owner(file) in ("mine", "third_party") for file in files)


def _kind_of_refusal(watch: LedgerWatch, region: Region) -> str:
    return "graph_break" if watch.place_of(region) in watch.broken else "skipped"


def _callers(region: Region) -> Iterator[types.FrameType]:
    """Frames between a compiled callable and what runs now, innermost first, without ours."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_CALLBACK):
        frame = frame.f_back
    while frame is not None and (frame := frame.f_back) is not region.frame:
        if frame is not None:
            yield frame


def _unless_inside(watch: LedgerWatch, region: Region, eager: EagerFrame) -> EagerFrame | None:
    """A record, unless the frame is called by one that is known to run eagerly."""
    for frame in _callers(region):
        if watch.eager.get(id(frame.f_code)) is frame.f_code:
            return None
    return eager


def _globals_read(attempt: FrameAttempt) -> Iterator[Any]:
    """Values of the globals that a function reads; of a resume function only the rest, to which it jumps first."""
    if attempt.frame_code is None:
        return
    start = 0
    scope = attempt.scope()["G"]
    for instruction in dis.get_instructions(attempt.frame_code):
        if attempt.resumed_at and not start and instruction.opname.startswith("JUMP"):
            start = instruction.argval
        reads = instruction.opname == "LOAD_GLOBAL" and instruction.argval in scope
        if reads and instruction.offset >= start:
            yield scope[instruction.argval]


def _holds_hidden_tensor(attempt: FrameAttempt) -> bool:
    """Whether a tensor or module lies in an attribute of what a function holds; runs no code of the user's."""
    import torch

    waiting = [value for name, value in attempt.scope().items() if name != "G"]
    waiting += _globals_read(attempt)
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
        # Classes, modules and functions lead to everything, and hold none of this call's tensors.
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            return True
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        else:
            waiting += _attribute_values(value)
    return False


def _attribute_values(value: object) -> list[Any]:
    """What an object holds in its ``__dict__`` and in slots."""
    try:
        values = list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        values = []
    for base in type(value).__mro__:
        for attribute in vars(base).values():
            if not isinstance(attribute, types.MemberDescriptorType):
                continue
            try:
                values.append(attribute.__get__(value, type(value)))
            except AttributeError:  # not set
                continue
    return values
