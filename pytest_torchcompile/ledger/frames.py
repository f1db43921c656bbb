"""What Dynamo decided for each frame that it was asked to compile, and calls that ran no graph at all.

Two private places, both looked up by torch at each call (torch 2.8 to 2.15):

* ``CatchErrorsWrapper.__call__`` (torch/_dynamo/convert_frame.py): the callback that the frame evaluator
  calls for a frame without a fitting entry. Its result, or what it raises, is the decision.
* ``_callback_from_stance`` and ``_maybe_set_eval_frame`` (torch/_dynamo/eval_frame.py): called at the
  beginning and at the end of each call of a compiled callable.

A third one times guards (:func:`_time_guards_often`).

And frames that torch runs from what is compiled already, or else eagerly, without a word. So it treats a function that
has hit the recompile limit, every frame under the stance ``eager_on_recompile``, and what ``torch._dynamo.run`` runs:
it looks into the cache, and where nothing fits it does not call Dynamo's callback. While a ledger is open it has one to
call, which notes the frame and leaves it as eager as it would have been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger import decisions
from pytest_torchcompile.ledger.entries import cache_entries
from pytest_torchcompile.ledger.users import FrameAttempt, Region

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch

__all__ = ["install_hook"]

_GUARD_TIMINGS: Final = 5
"""On a busy machine a single one of 0.1 ms came out as 8 ms; five in a row are not all interrupted."""
_QUICK_GUARDS: Final = 200.0
"""Microseconds of guards whose single timing will do, unless a limit is set on them: it is a fifth to a third above the
shortest of five. Each timing empties the processor's caches first, which takes 17 ms (torch 2.13), a third of
compiling a small model."""


@contextlib.contextmanager
def install_hook(watch: LedgerWatch) -> Iterator[None]:
    """Report to ``watch`` while the block runs."""
    with _watch_decisions(watch), _watch_calls(watch), _watch_limited(watch), _time_guards_often(watch):
        yield


@contextlib.contextmanager
def _time_guards_often(watch: LedgerWatch) -> Iterator[None]:
    """Have torch time guards a few times where they seem slow, and take the shortest: a single time may be interrupted.

    ``profile_guard_manager(guards, locals, repeats)`` in torch/_dynamo/guards.py returns microseconds, which torch asks
    for once (torch 2.9 to 2.15); before it there are none.
    """
    from torch._dynamo import guards

    original = getattr(guards, "profile_guard_manager", None)
    if original is None:
        yield
        return

    def shortest_time(*asked: Any) -> Any:
        always_often = any(ledger.times_guards_often for ledger, _ in watch.ledgers)
        shortest = original(*asked)
        for _ in range(_GUARD_TIMINGS - 1):
            if shortest <= _QUICK_GUARDS and not always_often:
                break
            shortest = min(shortest, original(*asked))
        return shortest

    with _replaced_attribute(guards, "profile_guard_manager", shortest_time):
        yield


def _own_attribute(owner: Any, name: str) -> Any:
    import torch

    try:
        return vars(owner)[name]
    except KeyError:
        raise InstrumentError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which tells compiled calls from "
            "eager ones; please report it with this version"
        ) from None


@contextlib.contextmanager
def _replaced_attribute(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _watch_decisions(watch: LedgerWatch) -> Iterator[None]:
    from torch._dynamo import convert_frame

    original = _own_attribute(_own_attribute(convert_frame, "CatchErrorsWrapper"), "__call__")

    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        # Its first further argument is the entry that there is, if any.
        attempt = watch.run_guarded(watch.functions.begin_attempt, frame, bool(args) and args[0] is not None)
        if attempt is None:  # the bookkeeping failed, and has said so
            attempt = FrameAttempt()
        if watch.limited and (known := _asked_again(watch, frame.f_code)) is not None:
            watch.run_guarded(decisions.enter_limited_call, watch, attempt)
            return known
        watch.thread.attempts.append(attempt)
        try:
            with watch.marker("") if watch.marker else contextlib.nullcontext():
                result = original(self, frame, *args, **kwargs)
        except BaseException as error:
            watch.thread.attempts.pop()
            watch.run_guarded(decisions.enter_failed_compile, watch, attempt, error)
            raise
        watch.thread.attempts.pop()
        watch.run_guarded(decisions.enter_decision, watch, attempt, result)
        return watch.run_guarded(_answer_for, watch, frame.f_code, result) or result

    # Torch walks the stack and steps over the frames of convert_frame.py by file name (`prev_frame` in
    # ConvertFrameAssert.__call__ decides on non-recursive disable; log_dynamo_start cuts the user's stack).
    # Ours has to be stepped over too, or other frames would be compiled than without us.
    code = call.__code__.replace(co_filename=original.__code__.co_filename)
    disguised = types.FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    with _replaced_attribute(convert_frame.CatchErrorsWrapper, "__call__", disguised):
        yield


@contextlib.contextmanager
def _watch_calls(watch: LedgerWatch) -> Iterator[None]:
    from torch._dynamo import eval_frame

    begin = _own_attribute(eval_frame, "_callback_from_stance")
    switch = _own_attribute(eval_frame, "_maybe_set_eval_frame")
    refrain = _refraining_callback(watch)
    caller = sys._getframe

    # These two run in every call: as little as possible of ours in them. `compile_wrapper` calls the first once, when
    # the call begins, and the second twice: when it has begun and when it ends.

    def callback_from_stance(callback: Any) -> Any:
        result = begin(callback)
        if callback is not None:  # None is torch.compiler.disable
            thread = watch.thread
            # False is torch._dynamo.run.
            thread.regions.append(Region(caller(1), thread.runs, run_only=callback is False))
        return refrain if result is False else result

    def maybe_set_eval_frame(callback: Any) -> Any:
        thread = watch.thread
        # Torch calls this from other places too, and a call may have begun before the hooks went in.
        if (regions := thread.regions) and (region := regions[-1]).frame is caller(1):
            if not region.entered:
                region.entered = True
            else:
                regions.pop()
                if watch.awaited:
                    watch.run_guarded(watch.end_call, region, thread.runs > region.runs_before)
                if thread.runs == region.runs_before:  # else a graph ran, as usual
                    watch.run_guarded(decisions.enter_call_without_graph, watch, region)
        # Last: from here on Dynamo may look at each new frame, also at ours.
        return switch(callback)

    with (
        _replaced_attribute(eval_frame, "_callback_from_stance", callback_from_stance),
        _replaced_attribute(eval_frame, "_maybe_set_eval_frame", maybe_set_eval_frame),
    ):
        yield


# ----------------------------------------------------------------- frames that torch runs from what is compiled already
# ``ConvertFrameReturn`` (torch/_dynamo/types.py), ``_FrameAction``, ``_FrameExecStrategy`` and
# ``set_code_exec_strategy`` (torch._C._dynamo.eval_frame), ``input_codes`` (convert_frame.py): seen in torch 2.13.


@contextlib.contextmanager
def _watch_limited(watch: LedgerWatch) -> Iterator[None]:
    """Have torch ask for functions over their limit too; afterwards it does so no more."""
    watch.limited = {id(code): code for code in _still_over_their_limit()}
    _set_action(watch.limited.values(), "DEFAULT")
    try:
        yield
    finally:
        from torch._dynamo.convert_frame import input_codes

        # Where torch.compiler.reset() has forgotten a code, it has forgotten that it was over its limit.
        limited = [code for code in watch.limited.values() if code in input_codes]
        _set_action(limited, "RUN_ONLY")
        watch.limited = {}


def _refraining_callback(watch: LedgerWatch) -> Callable[..., Any]:
    """What stands in for ``False``, torch's word for running only what is compiled."""
    from torch._dynamo.types import ConvertFrameReturn

    def refrain(frame: Any, *args: Any, **kwargs: Any) -> Any:
        watch.run_guarded(decisions.enter_refrained_frame, watch, frame)
        return ConvertFrameReturn(frame_exec_strategy=_strategy_of("DEFAULT"), apply_to_code=False)

    # With these an entry of any backend fits, as it does for False (`get_backend` in csrc/dynamo).
    refrain._torchdynamo_orig_backend = refrain._torchdynamo_orig_callable = False  # type: ignore[attr-defined]
    return refrain


def _answer_for(watch: LedgerWatch, code: types.CodeType, result: Any) -> Any:
    """What to return for Dynamo's ``result``: over its limit, a code is asked for again, to be counted again."""
    if result.guarded_code is not None or result.frame_exec_strategy.cur_action != _action_named("RUN_ONLY"):
        return result
    watch.limited[id(code)] = code
    _remember_limited(code)
    return dataclasses.replace(result, apply_to_code=False)


def _asked_again(watch: LedgerWatch, code: types.CodeType) -> Any:
    """The answer for a code that is known to be over its limit; None for any other."""
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.types import ConvertFrameReturn

    if watch.limited.get(id(code)) is not code:
        return None
    if code not in input_codes:  # torch.compiler.reset() was called
        del watch.limited[id(code)]
        return None
    return ConvertFrameReturn(frame_exec_strategy=_strategy_of("RUN_ONLY"), apply_to_code=False)


_over: dict[int, tuple[weakref.ref[types.CodeType], weakref.ref[Any]]] = {}
"""Code that hit its limit under some observation, by its identity, and the guards of an entry that it has."""


def _remember_limited(code: types.CodeType) -> None:
    entries = cache_entries(code)
    if entries:
        # Weakly: a ledger that is closed keeps nothing of the user's alive.
        _over[id(code)] = weakref.ref(code), weakref.ref(entries[0].guard_manager)


def _still_over_their_limit() -> Iterator[types.CodeType]:
    """Codes that hit their limit in an earlier observation.

    Torch can't be asked. That the very same entry is still there tells that no ``torch.compiler.reset()``
    has come between: names and numbers of compiles begin anew with it.
    """
    for key, (code_reference, manager_reference) in list(_over.items()):
        code, manager = code_reference(), manager_reference()
        if code is not None and any(entry.guard_manager is manager for entry in cache_entries(code)):
            yield code
        else:
            del _over[key]


def _set_action(codes: Iterable[types.CodeType], action: str) -> None:
    from torch._C._dynamo import eval_frame

    for code in codes:
        eval_frame.set_code_exec_strategy(code, _strategy_of(action))


def _strategy_of(action: str) -> Any:
    """What torch shall do with a frame, and with those that it calls."""
    from torch._C._dynamo.eval_frame import _FrameExecStrategy

    return _FrameExecStrategy(_action_named(action), _action_named(action))


def _action_named(name: str) -> Any:
    from torch._C._dynamo.eval_frame import _FrameAction

    return getattr(_FrameAction, name)
