"""What the layer asks of Dynamo: a context whose frames run eagerly where they do not compile.

``torch._dynamo.optimize`` returns a context with a ``callback``, which the frame evaluator calls for a frame
without a fitting entry, before that frame has begun. ``suppress_errors`` makes torch's own callback answer "run it
eagerly" when it fails; it holds for the whole process, and nobody is told. Here the callback of one context does so,
and tells its guard.
"""

from __future__ import annotations

import contextlib
import copy
import time
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.layer.guarded_model import Guard
from pytest_torchcompile.layer.later_calls import guards_on_hooks

__all__ = ["CacheEntries", "backend_of", "dynamo_context", "remember_sizes"]

_CHAIN: Final = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
"""Attributes that lead from a callback to the backend: torch 2.9 and later; torch 2.8."""


def backend_of(settings: dict[str, Any]) -> Callable[..., Any] | None:
    """The backend object that ``torch.compile(**settings)`` makes; None where torch.compile is switched off.

    ``OptimizedModule.dynamo_ctx`` and its ``callback`` (torch/_dynamo/eval_frame.py, torch 2.8 to 2.15).
    Raises what torch raises for settings that it does not take.
    """
    probe: Any = torch.compile(torch.nn.Identity(), **settings)
    if not hasattr(probe, "_orig_mod"):
        return None
    callback = _attribute(_attribute(probe, "dynamo_ctx"), "callback")
    # Callbacks are wrapped in each other, and which attribute leads inwards depends on torch.
    while True:
        names = [name for name in _CHAIN if hasattr(callback, name)]
        if not names:
            return callback  # type: ignore[no-any-return]
        callback = getattr(callback, names[0])


def dynamo_context(backend: Callable[..., Any], settings: dict[str, Any], guard: Guard, entries: CacheEntries) -> Any:
    """A context as ``torch.compile`` makes one, with ``backend``; it reports to ``guard`` and notes in ``entries``.

    ``torch._dynamo.optimize(backend, nopython=, dynamic=, guard_filter_fn=)``: torch 2.8 to 2.15.
    """
    import torch._dynamo

    options = settings.get("options") or {}
    made: Any = torch._dynamo.optimize(backend, nopython=settings["fullgraph"], dynamic=settings["dynamic"],
                                       guard_filter_fn=options.get("guard_filter_fn"))
    made.callback = _falling_back(_attribute(made, "callback"), guard, entries)
    # torch 2.13 raises after a call with fullgraph=True in which no frame was compiled: when all of it has run. The
    # guard says it instead. That breaks are errors lies in the callback, not in this flag.
    made.fullgraph = False
    return made


class CacheEntries:
    """The entries that one context has put into Dynamo's caches during its trial."""

    def __init__(self) -> None:
        self.guards: list[Any] = []

    def drop(self) -> None:
        """Take them out again, and none of anybody else's.

        ``ExtraState.invalidate(entry, guards)``, as ``CheckFunctionManager.invalidate`` does (torch/_dynamo/guards.py,
        torch 2.8 to 2.15); without it the entries stay, and nothing uses them.
        """
        from torch._dynamo import guards

        deleted: Any = getattr(guards, "DeletedGuardManagerWrapper", None)
        for manager in self.guards:
            entry = getattr(manager, "cache_entry", None)
            state: Any = getattr(manager, "extra_state", None)
            # Of an entry that torch has dropped already nothing is left to do.
            if entry is not None and hasattr(state, "invalidate") and deleted is not None:
                state.invalidate(entry, deleted("its model fell back to eager"))
        self.guards.clear()

    def keep(self) -> None:
        """They stay."""
        self.guards.clear()


def remember_sizes() -> Callable[[], None]:
    """Remember which sizes Dynamo has seen, which decides what it compiles dynamically; return what puts that back.

    ``torch._dynamo.pgo._CODE_STATE`` (torch 2.8 to 2.15); without it nothing is put back.
    """
    from torch._dynamo import pgo

    # Deep, because torch adds to the entries in place.
    before = copy.deepcopy(getattr(pgo, "_CODE_STATE", None))

    def put_back() -> None:
        if hasattr(pgo, "_CODE_STATE"):
            pgo._CODE_STATE = before

    return put_back


def _falling_back(inner: Callable[..., Any], guard: Guard, entries: CacheEntries) -> Callable[..., Any]:
    """``CatchErrorsWrapper.__call__`` (torch/_dynamo/convert_frame.py), but what fails runs eagerly."""
    from torch._dynamo import config, convert_frame
    from torch._dynamo import types as dynamo_types

    action: Any = dynamo_types
    run_only = action.FrameAction.RUN_ONLY
    clock = time.perf_counter
    hook_guards: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if guard.hooks.guards.each_module:
        hook_guards = guards_on_hooks

    def call(frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        # After a failure no further frame of the call is compiled: all of it would be thrown away.
        if guard.runs_eagerly or guard.pending is not None:
            return _run_eagerly(dynamo_types)
        # Before the frame begins: what the backend raised for another one is old.
        began = clock()
        guard.frame_begins()
        try:
            with hook_guards():
                result = inner(frame, cache_entry, frame_state)
        except Exception as error:
            if _is_asked_for(error):
                raise
            guard.failed(error)
            return _run_eagerly(dynamo_types)
        finally:
            guard.seconds += clock() - began
        if result.guarded_code is not None:
            guard.hooks.look_again()
            if guard.under_test:
                entries.guards.append(result.guarded_code.guard_manager)
        elif result.frame_exec_strategy.cur_action == run_only:
            guard.note_limit(_limit_text(frame.f_code))
        elif config.suppress_errors and guard.backend_error is not None:
            # The program's own setting: torch told nobody.
            guard.failed(guard.backend_error)
            return _run_eagerly(dynamo_types)
        return result

    # Torch walks the stack and steps over frames of convert_frame.py by file name (`prev_frame` in
    # ConvertFrameAssert.__call__); this one has to be stepped over too.
    code = call.__code__.replace(co_filename=convert_frame.__file__)
    function = types.FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    for name in _CHAIN:
        # As if it were torch's own: stances follow the chain by its length.
        if hasattr(inner, name):
            setattr(function, name, getattr(inner, name))
    return function


def _run_eagerly(dynamo_types: Any) -> Any:
    """This frame runs eagerly, with all that it calls; the next one with its code is asked for again.

    ``FrameExecStrategy`` (torch/_dynamo/types.py, torch 2.8 to 2.15). Of what it calls Dynamo would ask us too, but for
    functions that have hit the recompile limit: below those any code runs that anybody has compiled with any backend.
    """
    action = dynamo_types.FrameAction
    strategy = dynamo_types.FrameExecStrategy(action.DEFAULT, action.SKIP)
    return dynamo_types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def _is_asked_for(error: Exception) -> bool:
    """Did the program ask torch to raise this (``error_on_recompile``, ``fail_on_recompile_limit_hit``)?"""
    from torch._dynamo import config, exc

    if isinstance(error, exc.FailOnRecompileLimitHit):
        return bool(config.fail_on_recompile_limit_hit)
    return isinstance(error, exc.RecompileError)


def _limit_text(code: types.CodeType) -> str:
    from torch._dynamo import config

    return (f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) hit the recompile limit of "
            f"{config.recompile_limit}; pytest_torchcompile.observe() tells what recompiles it")


def _attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise InstrumentError(f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which lets a model "
                              "fall back to eager; please report it with this version")
    return getattr(owner, name)
