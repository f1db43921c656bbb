"""What Dynamo decided for each frame that it was asked to compile, and calls that ran no graph at all.

Two private places, both looked up by torch at each call (torch 2.8 to 2.15):

* ``CatchErrorsWrapper.__call__`` (torch/_dynamo/convert_frame.py): the callback that the frame evaluator
  calls for a frame without a fitting entry. Its result, or what it raises, is the decision.
* ``_callback_from_stance`` and ``_maybe_set_eval_frame`` (torch/_dynamo/eval_frame.py): called at the
  beginning and at the end of each call of a compiled callable.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger import decisions, run_only
from pytest_torchcompile.ledger.in_progress import FrameAttempt, Region

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch

__all__ = ["install_hook"]


@contextlib.contextmanager
def install_hook(watch: LedgerWatch) -> Iterator[None]:
    """Report to ``watch`` while the block runs."""
    with _watch_decisions(watch), _watch_calls(watch), run_only.install_hook(watch):
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
        if watch.limited and (known := run_only.asked_again(watch, frame.f_code)) is not None:
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
        return watch.run_guarded(run_only.answer_for, watch, frame.f_code, result) or result

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
    refrain = run_only.refraining_callback(watch)
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
