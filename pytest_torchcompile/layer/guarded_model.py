"""Guard: what happens when a compiled model fails after it was handed out.

Nothing is ever run twice on state that the first run may have changed. A frame that does not compile has not begun, so
Dynamo is told to run that very frame eagerly (:mod:`.dynamo`); a compiled graph that raises is replaced by the same
graph run eagerly if what it writes to is known to be as before (:mod:`.graphs`), and a backward pass by the same
backward graph (:mod:`.backward`). When the call has ended well, the model runs eagerly for good, with one log record.
When it ends with an exception after all, that exception is the user's: eager raises it, so it goes through, and
nothing failed.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from pytest_torchcompile.errors import CannotFallBack, CompileFailed
from pytest_torchcompile.layer.attempt_log import Attempt, Seconds, error_headline
from pytest_torchcompile.layer.later_calls import Hooks, Outstanding, need_gradient, saving

__all__ = ["RAN", "Guard", "guard_of_this_call", "guarded_call"]

RAN = [0]
"""How many compiled graphs of guarded models have begun to run in this process; counted where each begins."""


def _nothing() -> None:
    """Nothing to undo."""


class Pending(NamedTuple):
    """A failure whose call has not ended yet."""

    error: BaseException
    phase: str
    thread: int


class Guard:
    """What is known of one compiled model; what it must decide when something fails.

    A model that comes with a sample batch is tested first (:attr:`under_test`). The calls of any other are watched
    until one has run compiled code (:attr:`watched`). A failure in a call is :attr:`pending` until the call ends. Then
    it makes the model run eagerly for good (:attr:`runs_eagerly`), at once or when that is safe
    (:attr:`eager_is_due`).
    """

    def __init__(self, attempt: Attempt, hooks: Hooks) -> None:
        self.attempt = attempt
        self.hooks = hooks
        self.undo: Callable[[], object] = _nothing
        """Takes back what was put into the model's parts."""

        # How calls run. The wrapper asks these in every call, so they are plain attributes.
        self.runs_eagerly = False
        """For good."""
        self.watched = True
        """Each call is asked what became of it: whether it ran compiled code, or whether eager's turn has come."""
        self.eager_is_due = False
        """It runs eagerly for good as soon as nothing compiled is left to be recomputed."""

        # The smoketest, and the speed check after it.
        self.under_test = False
        """Failures are raised as torch raises them: somebody looks at them."""
        self.ranks_wait = False
        """Under test, other ranks wait for this one in collectives: what fails is noted, and runs eagerly."""
        self.failure_under_test: BaseException | None = None
        """The first one."""

        # The call in progress.
        self.pending: Pending | None = None
        """Why a part of it runs eagerly."""
        self.backend_error: Exception | None = None
        """What the backend raised for the frame that is being compiled."""
        self.outstanding = Outstanding()

        # What the log has not been told yet.
        self.seconds = 0.0
        """Spent compiling since the last log record."""
        self.limits_to_log: dict[str, None] = {}
        """Functions that hit the recompile limit."""
        self._limits_seen: set[str] = set()
        self._lock = threading.Lock()

    # something failed

    def frame_begins(self) -> None:
        """Dynamo looks at a frame; no backend has refused a graph of it."""
        self.backend_error = None

    def failed(self, error: BaseException, phase: str = "call", running: int = 0) -> None:
        """A part of the model failed, and can be run eagerly in the state that it found.

        ``running``: 1 if it is a compiled graph that has begun to run. Raises the error where that is asked for, and
        :class:`CannotFallBack` where eager must not take over in the middle.
        """
        if self.under_test:
            self.note(error)
        else:
            why = self.outstanding.why_not_eager(RAN[0] - running)
            if why:
                self.refuse(error, f"{why}. Compile inside of the checkpointed function instead of around it, or give "
                                   "maybe_compile a sample batch, so that failures are found before training", phase)
        # The first failure of a call is the cause of the others.
        if self.pending is None:
            self.pending = Pending(error, phase, threading.get_ident())

    def note(self, error: BaseException) -> None:
        """Remember a failure of a test, and raise it unless other ranks wait."""
        # The first one, of which later ones may only be the echo.
        self.failure_under_test = self.failure_under_test or error
        if not self.ranks_wait:
            raise error

    def refuse(self, error: BaseException, why: str, phase: str = "call") -> None:
        """Raise :class:`CannotFallBack`. Calls from then on run eagerly, if none is left to be recomputed."""
        if not self.under_test:
            self._log("cannot_fall_back", phase, error, f"{error_headline(error)}; {why}")
            # The step is lost, and the next one does not depend on it.
            if not self.outstanding.count:
                self.drop()
        raise CannotFallBack(f"{self.attempt.model}, compiled, failed ({error_headline(error)}), and to go on eagerly "
                             f"could give other results than eager gives: {why}.") from error

    def failed_backward(self, error: BaseException) -> None:
        """A compiled backward pass failed, and its graph is run eagerly instead: that is the end of compiled code."""
        if self.under_test:
            self.note(error)
        elif self.outstanding.count and self.attempt.config.fail_policy != "raise":
            self._log("fallback_eager", "backward", error, f"{error_headline(error)}; its forward pass runs "
                      "eagerly from the first call on in which none is left to be recomputed by activation "
                      "checkpointing")
            # Watched, so that each call asks whether the last recompute has come.
            self.eager_is_due = self.watched = True
        else:
            self._end(Pending(error, "backward", threading.get_ident()))

    def noted_failure(self) -> BaseException | None:
        """What failed under test, for the smoketest: on a rank that others wait for it is not raised."""
        return self.failure_under_test

    def note_limit(self, function: str) -> None:
        """A function hit the recompile limit."""
        with self._lock:
            if function not in self._limits_seen:
                self._limits_seen.add(function)
                self.limits_to_log[function] = None

    def drop(self) -> None:
        """The parts of the model are as they were, and run eagerly."""
        self.runs_eagerly = True
        self.undo()

    # a hook is new

    def hook_registered(self) -> None:
        """Somebody has registered a hook since the last call. If the model runs it, its code is compiled again."""
        new_hook = self.hooks.notice_new()
        # While it is watched for its first compiled call nothing has been compiled without the hook.
        if new_hook and not (self.watched or self.under_test):
            self._log("hooks_changed", "call", None, new_hook)

    # a call ends

    def settle(self) -> None:
        """A call ended without an exception: what failed in it was the compiler's fault."""
        for function in [*self.limits_to_log]:
            # Another thread may have logged it meanwhile.
            if self.limits_to_log.pop(function, True) is None:
                self._log("recompile_limit", "call", None, function)
        pending = self._take_pending()
        if pending is not None:
            self._end(pending)

    def dismiss(self) -> None:
        """A call ended with an exception, in parts that ran eagerly too: it is the user's."""
        self._take_pending()

    def _take_pending(self) -> Pending | None:
        """What is pending in this thread, which is then over."""
        pending = self.pending
        # The calls of other threads may still be under way, and each settles its own.
        if pending is None or pending.thread != threading.get_ident():
            return None
        self.pending = None
        return pending

    def _end(self, pending: Pending) -> None:
        # Under test the smoketest says what becomes of the model.
        if self.under_test:
            return
        error = pending.error
        if self.attempt.config.fail_policy == "raise":
            self._log("raised", pending.phase, error)
            raise CompileFailed(f"{self.attempt.model} does not run compiled: {error_headline(error)}") from error
        # Two threads may fail at once; one of them logs it and takes back what was put in.
        with self._lock:
            if self.runs_eagerly:
                return
            self.runs_eagerly = True
        self.undo()
        self._log("fallback_eager", pending.phase, error)

    def call_slowly(
        self, compiled: Callable[..., Any], eager: Callable[..., Any], part: bool, args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """A call that may be the first, or that activation checkpointing may run again."""
        # The last recompute has come, so that nothing depends on compiled code any more.
        if self.eager_is_due and not self.outstanding.count:
            self.drop()
            return eager(*args, **kwargs)
        before = RAN[0]
        with self.outstanding.call(args, kwargs, before):
            try:
                result = compiled(*args, **kwargs)
            except BaseException:
                # Also of KeyboardInterrupt: nothing of this call may be settled by the next one.
                self.dismiss()
                raise
        if self.pending is not None or self.limits_to_log:
            self.settle()
        if self.watched and not (part or self.under_test or self.runs_eagerly or self.eager_is_due):
            self._log_first_call(RAN[0] > before)
        return result

    def _log_first_call(self, compiled: bool) -> None:
        from pytest_torchcompile.state.torch_state import stance

        # A stance that asks for eager says nothing of the model: it stays watched.
        if compiled:
            self.watched = False
            self._log("compiled", "call")
        elif stance() == "default":
            self.watched = False
            self._log("nothing_compiled", "call", None, "no compiled graph ran in its first call")

    def _log(self, result: str, phase: str, error: BaseException | None = None, reason: str = "") -> None:
        seconds = self.take_seconds()
        self.attempt.log(result, phase, Seconds(seconds, seconds), error, reason)

    def take_seconds(self) -> float:
        """The seconds spent compiling, which then are told."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def guarded_call(
    guard: Guard, make_compiled: Callable[[], Callable[..., Any]], eager: Callable[..., Any], part: bool = False
) -> Callable[..., Any]:
    """Return what calls ``make_compiled()`` under a guard, and ``eager`` when that has failed or while torch traces.

    It is made anew where a new hook asks for it. ``part``: whether anything was compiled is asked of the whole model's
    call.
    """
    # is_compiling() is two calls in Python; this is one, and torch's own flag for export (torch 2.8 to 2.15).
    traced, compiler, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.compiler, torch.is_grad_enabled
    outstanding, hooks, handles = guard.outstanding, guard.hooks, RemovableHandle
    compiled = make_compiled()

    def renew() -> None:
        nonlocal compiled
        compiled = make_compiled()

    hooks.on_change(renew)

    def call(*args: Any, **kwargs: Any) -> Any:
        # In every call: attributes and C functions alone, in the order of what is cheapest.
        if guard.runs_eagerly or traced() or compiler._is_compiling_flag:
            return eager(*args, **kwargs)
        # torch numbers all hooks of the process in one row: as long as it stands still, none is new.
        if handles.next_id != hooks.seen:
            guard.hook_registered()
        if guard.watched or outstanding.count or saving(True) is not None or (
            not is_grad_enabled() and need_gradient(args, kwargs)
        ):
            return guard.call_slowly(compiled, eager, part, args, kwargs)
        try:
            result = compiled(*args, **kwargs)
        except BaseException:
            guard.dismiss()
            raise
        if guard.pending is not None or guard.limits_to_log:
            guard.settle()
        return result

    CODES.add(call.__code__)
    return call


CODES: set[Any] = set()
"""Code of the function above: a frame of it on the stack holds the guard of the model that is being called."""


def guard_of_this_call() -> Guard | None:
    """The guard of the model whose call this thread is in."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in CODES:
            return frame.f_locals["guard"]  # type: ignore[no-any-return]
        frame = frame.f_back
    return None
