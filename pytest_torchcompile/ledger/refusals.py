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

from pytest_torchcompile.ledger.in_progress import Attempt, Region
from pytest_torchcompile.ledger.records import EagerFrame
from pytest_torchcompile.ledger.sites import code_owner, is_torch

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import Watch

__all__ = ["IN_PLACE", "in_place", "never_seen", "refused"]

IN_PLACE: Final = ("torch does not compile modules of its own in place, by module.compile(); "
                   "torch.compile(module) does")  # fmt: skip
_MODULES: Final = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\](?!module\.py|container\.py)\w+\.py$")
"""Files with modules of torch's own that have work to do; a container's is that of its children."""
_NO_TENSOR: Final = "no tensor-related objects found in frame"
"""torch/_dynamo/convert_frame.py, seen in torch 2.13; 2.8 to 2.10 say nothing."""
_CALLBACK: Final = "torch/_dynamo/convert_frame.py"
"""The file that our own hook pretends to be of (:mod:`.frames`): what is further out is not ours."""
_MOST_OBJECTS: Final = 1000
_GENERATOR: Final = "torch does not compile a generator by itself, only as part of a caller's graph"
_COROUTINE: Final = "before Python 3.11 torch is not asked about a coroutine"


def in_place(function: object) -> bool:
    """Whether a compiled callable is what ``module.compile()`` compiles (torch/nn/modules/module.py, seen in 2.13)."""
    return isinstance(function, types.MethodType) and function.__name__ == "_call_impl"


def never_seen(code: types.CodeType | None) -> str:
    """Why Dynamo is not asked about a function before Python 3.11: its body first runs after the call; else ''."""
    if code is None or sys.version_info >= (3, 11):
        return ""
    if code.co_flags & inspect.CO_GENERATOR:
        return _GENERATOR
    return _COROUTINE if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR) else ""


def refused(watch: Watch, attempt: Attempt, reason: str) -> tuple[EagerFrame | None, bool]:
    """The record of a frame that was refused, and whether it is to be entered whatever else the call does."""
    from torch._dynamo import config

    if config.disable:  # told for the whole call, when it ends
        return None, False
    region = watch.thread.regions[-1] if watch.thread.regions else None
    if "disabled for this frame" in reason:
        return EagerFrame(*attempt.where, reason, "disabled"), True
    if region and attempt.code[1] == "forward" and _MODULES.search(attempt.code[0]):
        if attempt.function == "Identity.forward":
            return EagerFrame(*attempt.where, "it has nothing to compile", "empty"), False
        return _module(watch, attempt, region), True
    if attempt.code[0] != attempt.file:  # a frame of torch's own
        return None, False
    generator = bool(attempt.frame_code and attempt.frame_code.co_flags & inspect.CO_GENERATOR)
    if reason == _NO_TENSOR or (not reason and not generator):
        if not region or not _asked_for(attempt, region) or not _hidden_tensor(attempt):
            return (EagerFrame(*attempt.where, reason, "empty") if reason else None), False
        rest = f"the rest after line {attempt.resumed_at}" if attempt.resumed_at else "the call"
        text = f"{rest} ran eagerly: torch saw no tensor among its arguments, and does not look into objects"
        return _unless_inside(watch, region, EagerFrame(*attempt.where, text, _kind(watch, region))), True
    if generator:
        reason = _GENERATOR
    return (EagerFrame(*attempt.where, reason, "skipped") if reason else None), False


def _module(watch: Watch, attempt: Attempt, region: Region) -> EagerFrame | None:
    """A module of torch's own that runs by itself."""
    asked = watch.callable_place(region)
    if in_place(region.function) and is_torch(asked[1]):
        return None if region.gave_up else EagerFrame(*asked, IN_PLACE, "skipped")
    kind = _kind(watch, region)
    text = "torch compiles its own modules only as part of a caller's graph, and "
    text += "a graph break took this one out" if kind == "graph_break" else "here it was called from none"
    at = next((f"{os.path.basename(f.f_code.co_filename)}:{f.f_lineno}" for f in _callers(region)
               if not is_torch(f.f_code.co_filename)), "")  # fmt: skip
    return _unless_inside(watch, region, EagerFrame(*attempt.where, f"{text}, at {at}" if at else text, kind))


def _asked_for(attempt: Attempt, region: Region) -> bool:
    """Whether a frame is the user's (or a library's) and called from there, and no plumbing of torch's or Python's."""
    caller = next(_callers(region), None)
    called_from = caller.f_code.co_filename if caller else attempt.file
    return all(code_owner(path) in ("mine", "third_party") for path in (attempt.file, called_from))


def _kind(watch: Watch, region: Region) -> str:
    return "graph_break" if watch.callable_place(region) in watch.broken else "skipped"


def _callers(region: Region) -> Iterator[types.FrameType]:
    """Frames between a compiled callable and what runs now, innermost first, without ours."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_CALLBACK):
        frame = frame.f_back
    while frame is not None and (frame := frame.f_back) is not region.frame:
        if frame is not None:
            yield frame


def _unless_inside(watch: Watch, region: Region, found: EagerFrame) -> EagerFrame | None:
    """A record, unless the frame is called by one that is known to run eagerly."""
    known = (watch.eager.get(id(frame.f_code)) is frame.f_code for frame in _callers(region))
    return None if any(known) else found


def _globals_read(attempt: Attempt) -> Iterator[Any]:
    """Values of the globals that a function reads; of a resume function only the rest, to which it jumps first."""
    start = 0
    scope = attempt.scope()["G"]
    for found in dis.get_instructions(attempt.frame_code) if attempt.frame_code else ():
        if attempt.resumed_at and not start and found.opname.startswith("JUMP"):
            start = found.argval
        if found.offset >= start and found.opname == "LOAD_GLOBAL" and found.argval in scope:
            yield scope[found.argval]


def _hidden_tensor(attempt: Attempt) -> bool:
    """Whether a tensor or module lies in an attribute of what a function holds; runs no code of the user's."""
    import torch

    waiting = [value for name, value in attempt.scope().items() if name != "G"]
    waiting += _globals_read(attempt)
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
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
            waiting += _held(value)
    return False


def _held(value: object) -> list[Any]:
    """What an object holds in its ``__dict__`` and in slots."""
    try:
        held = list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        held = []
    slots = [found for base in type(value).__mro__ for found in vars(base).values()
             if isinstance(found, types.MemberDescriptorType)]  # fmt: skip
    for slot in slots:
        try:
            held.append(slot.__get__(value, type(value)))
        except AttributeError:  # not set
            continue
    return held
