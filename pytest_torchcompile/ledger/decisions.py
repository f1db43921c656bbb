"""From what Dynamo decided for a frame to the records of the ledger."""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger.break_sites import headlines, is_limit, is_torch, parse_break
from pytest_torchcompile.ledger.entries import (
    actual_value,
    cache_entries,
    changed_state,
    commonest_reason,
    guards_of,
    nearest_reason,
)
from pytest_torchcompile.ledger.reasons import Reason, classify_guard, read_reason, split_reasons, user_expression
from pytest_torchcompile.ledger.records import FAILED_GUARD, Compile, EagerFrame, FailedCompile
from pytest_torchcompile.ledger.refusals import IN_PLACE, is_in_place, refused_frame, why_never_seen
from pytest_torchcompile.ledger.users import FrameAttempt, FunctionPlace, Region, code_of, is_disabled, runs_later

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch, OtherThread

__all__ = [
    "enter_call_without_graph", "enter_decision", "enter_failed_compile", "enter_limited_call", "enter_refrained_frame",
    "read_failed_guards", "seconds_in",
]  # fmt: skip

_NEVER_RAISED: Final = ("Unsupported", "UserError")
"""Errors that torch turns into eager frames, unless fullgraph=True (``ConvertFrame.__call__``)."""

_CUMULATIVE: Final = {
    "dynamo": "dynamo_cumulative_compile_time_us",
    "aot": "aot_autograd_cumulative_compile_time_us",
    "inductor": "inductor_cumulative_compile_time_us",
    # Named for Triton, but on a CPU the wait for g++ (AsyncCompile.wait) goes here as well.
    "kernels": "triton_compile_time_us",
}
"""Fields of ``CompilationMetrics`` (torch/_dynamo/utils.py, torch 2.8 to 2.15), outermost first."""


def read_failed_guards(attempt: FrameAttempt, payload: str | None) -> tuple[Reason, ...]:
    """The failed guards of each cached entry, with the value that each of them met."""
    return tuple(_complete_reason(attempt, read_reason(text)) for text in split_reasons(payload))


def _complete_reason(attempt: FrameAttempt, reason: Reason) -> Reason:
    """A failed guard in the user's words, with what torch does not tell of it."""
    what, expected, actual = reason.what, reason.expected, reason.actual
    if not what:
        what, expected, actual = changed_state(reason.guard)
    elif not actual:
        actual = actual_value(what, attempt.scope())
    # The frame is torch's own around a module, and calls that fn.
    if attempt.code[0] != attempt.file:
        what = re.sub(r"^fn\b", "self", what)
    # What lay on Python's stack when the graph broke, such as the result of the call that broke it.
    what = re.sub(r"\b___stack\d+\b", f"(value at line {attempt.resumed_at})", what)
    return replace(reason, what=user_expression(what), expected=user_expression(expected), actual=actual)


def enter_failed_compile(watch: LedgerWatch, attempt: FrameAttempt, error: BaseException) -> None:
    """A compile that raised to the caller; with fullgraph=True a graph break does."""
    # Without metrics torch had not begun to trace, so this is no compile's error.
    if not attempt.metrics:
        return
    compile_id = attempt.metrics.get("compile_id") or ""
    # Torch records no break that it raises.
    if type(error).__name__ == "Unsupported" and not attempt.breaks:
        _enter_unrecorded_break(watch, attempt, str(error), getattr(error, "real_stack", None))
    watch.add(FailedCompile(*attempt.where, compile_id, type(error).__name__, str(error)))


def _enter_unrecorded_break(watch: LedgerWatch, attempt: FrameAttempt, message: str, stack: Any) -> None:
    """A graph break that torch has no record of, in the words of one."""
    user = "".join(traceback.format_list(stack)) if stack else _failed_line(attempt)
    text = f"Graph Break Reason: {message.partition('from user code')[0]}\nUser code traceback:\n{user}"
    compile_id, traced = attempt.metrics.get("compile_id") or "", attempt.traced
    for ledger, root in watch.ledgers:
        found = parse_break(text, root=root, during=ledger.label, compile_id=compile_id, traced=traced)
        attempt.breaks.append(ledger.add(found))


def _failed_line(attempt: FrameAttempt) -> str:
    """The line at which torch gave a frame up, as a traceback writes it (``CompilationMetrics``, 2.8 to 2.15)."""
    file, line = attempt.metrics.get("fail_user_frame_filename"), attempt.metrics.get("fail_user_frame_lineno")
    if not file or not line:
        return ""
    # Torch names no function. It is known where the line is one of the traced code's own.
    function, traced = "?", attempt.traced
    if file == traced.file and traced.first_line <= line <= traced.last_line:
        function = traced.name
    return f'  File "{file}", line {line}, in {function}\n'


def enter_decision(watch: LedgerWatch, attempt: FrameAttempt, result: Any) -> None:
    """A compile that ended: compiled code, or an eager frame. One that was never traced says nothing."""
    if result.guarded_code is not None:
        _enter_compile(watch, attempt, result.guarded_code)
        return
    skip_reason = getattr(result, "skip_reason", None) or ""
    if attempt.metrics:
        eager, loud = _abandoned_frame(attempt, skip_reason)
    else:
        refusal = refused_frame(watch, attempt, skip_reason)
        if refusal is None:
            return
        eager, loud = refusal
    if not loud:
        # No fault by itself. It is the reason if no graph at all runs in this call.
        if watch.thread.regions:
            watch.thread.regions[-1].quiet += (eager,)
        return
    if eager.kind == "graph_break" and attempt.metrics:
        if not attempt.breaks:
            _enter_unrecorded_break(watch, attempt, attempt.metrics.get("fail_reason") or "", None)
        # The newest break is the one that torch could not resume from, one record in each ledger.
        for found in attempt.breaks[-len(watch.ledgers) :]:
            found.whole_frame, found.gave_up = True, attempt.function
    if eager.kind == "limit":
        eager = replace(eager, reason=eager.reason + _missed_limit(watch))
    watch.give_up(attempt, eager)


def _enter_compile(watch: LedgerWatch, attempt: FrameAttempt, made: Any) -> None:
    """Compiled code was made for a frame."""
    if not attempt.heard:
        watch.note_loss(f"{attempt.function} was compiled without a record: something took the handler from the "
                        "logger torch.__trace")
    raced = watch.lost_race(attempt, made)
    reason = Reason("") if raced else _recompile_reason(attempt, made)
    watch.add(_compile_record(attempt, str(made.compile_id), reason, raced, watch.other_thread()))
    watch.finished[id(attempt.frame_code)] = (threading.get_ident(), time.perf_counter())


def _recompile_reason(attempt: FrameAttempt, made: Any) -> Reason:
    """Why a compile was needed: of several cached entries, what the nearest one lacked."""
    if not attempt.reasons:
        # The record of the guards was lost. The metrics have the first of them too.
        text = attempt.metrics.get("recompile_reason")
        if text:
            return read_reason(text)
    if len(attempt.reasons) < 2 or attempt.frame_code is None:
        return nearest_reason(attempt.reasons, (), {})
    known = {str(entry.compile_id): guards_of(entry.guard_manager) for entry in cache_entries(attempt.frame_code)}
    return nearest_reason(attempt.reasons, guards_of(made.guard_manager), known)


def _kind_of_compile(attempt: FrameAttempt, compile_id: str, guard: str, raced: bool) -> str:
    # Compiled autograd traces a backward as a frame of its own.
    if compile_id.startswith("!") and not guard:
        return "backward"
    if raced:
        return "raced"
    if guard:
        return "recompile"
    # An entry was there and no guard of its own failed: it is that of another torch.compile of this function.
    if attempt.cached or attempt.reasons:
        return "instance"
    if attempt.resumed_at:
        return "resume"
    return "first"


def _compile_record(attempt: FrameAttempt, compile_id: str, reason: Reason, raced: bool,
                    other: OtherThread) -> Compile:
    metrics = attempt.metrics
    cause = classify_guard(reason.guard, attempt.freevars, reason.actual) if reason.guard else ""
    # Torch may shorten the path of the user's own file; that is known whole.
    path, _, line = reason.at.rpartition(":")
    if path and attempt.file.endswith(path):
        reason = replace(reason, at=f"{attempt.file}:{line}")
    return Compile(
        *attempt.where, compile_id, _kind_of_compile(attempt, compile_id, reason.guard, raced),
        reason=reason.guard, cause=cause, all_reasons=tuple(other.guard for other in attempt.reasons),
        **reason.guard_facts(),
        graphs=attempt.graphs, ops=attempt.ops, guards=metrics.get("guard_count") or 0,
        guard_microseconds=metrics.get("guard_latency_us") or 0,
        seconds=(metrics.get("duration_us") or 0) / 1e6, seconds_in=seconds_in(metrics),
        specialised=dict(attempt.specialised),
        resumed_at=attempt.resumed_at, caches=tuple(attempt.caches), cache_keys=tuple(attempt.cache_keys),
        thread=other.name, missed=other.missed,
    )  # fmt: skip


def seconds_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Wall seconds of each stage without those inside it, from one compile's metrics record.

    Torch measures cumulatively: Dynamo calls AOTAutograd, which calls Inductor, which waits for its kernels.

    >>> seconds_in({"dynamo_cumulative_compile_time_us": 5_000_000, "aot_autograd_cumulative_compile_time_us":
    ...     4_000_000, "inductor_cumulative_compile_time_us": 3_000_000, "triton_compile_time_us": 1_000_000})
    {'dynamo': 1.0, 'aot': 1.0, 'inductor': 2.0, 'kernels': 1.0}
    """
    times = {name: metrics.get(key) or 0 for name, key in _CUMULATIVE.items()}
    # Dynamo has no part in a backward, and its time is in no cumulative field.
    if not times["dynamo"]:
        total = metrics.get("duration_us") or 0
        times["aot"] = max(total, times["aot"], times["inductor"])
    # From the innermost stage outwards. A stage that did not run has 0, and the next inner one counts instead.
    own: dict[str, float] = {}
    inside = 0
    for name in reversed(times):
        if times[name]:
            own[name] = max(0, times[name] - inside) / 1e6
        inside = max(inside, times[name])
    return {name: own[name] for name in times if name in own}


def _eager_frame(attempt: FrameAttempt, reason: str, kind: str) -> EagerFrame:
    """The record of a frame, or of the rest of one, that was given up."""
    return EagerFrame(*attempt.where, reason, kind, resumed_at=attempt.resumed_at)


def _abandoned_frame(attempt: FrameAttempt, skip_reason: str) -> tuple[EagerFrame, bool]:
    """A frame that torch traced and gave up; and whether that alone is to be entered."""
    fail_type, why = attempt.metrics.get("fail_type"), attempt.metrics.get("fail_reason") or ""
    if fail_type is None and attempt.breaks and not skip_reason:
        # Torch 2.8 to 2.10 give up a frame at a break in a loop, also in what the loop calls, and do not say so.
        why = f"{attempt.breaks[-1].reason}; then torch gave all of it up, as for a break in a loop"
        return _eager_frame(attempt, why, "graph_break"), True
    if fail_type is None:
        # A traced path without an operator. Torch skips such a frame for good, also in calls that have work to do.
        why = " ".join(headlines(skip_reason.partition("tracing: ")[2]))
        return EagerFrame(*attempt.where, why or "no operator traced", "empty"), False
    if attempt.reasons and is_limit(why):
        guard = commonest_reason(attempt.reasons).guard
        return _eager_frame(attempt, f"{headlines(why)[0]}; {FAILED_GUARD}{guard}", "limit"), True
    if fail_type in _NEVER_RAISED:
        return _eager_frame(attempt, "; then ".join(headlines(why)), "graph_break"), True
    return _eager_frame(attempt, f"{fail_type}: {' '.join(why.split())}", "suppressed"), True


def enter_limited_call(watch: LedgerWatch, attempt: FrameAttempt) -> None:
    """One more call of a frame that hit its recompile limit, now or before the observation began."""
    count = len(cache_entries(attempt.frame_code)) if attempt.frame_code else 0
    watch.give_up(attempt, _eager_frame(attempt, _limit_reason(count) + _missed_limit(watch), "limit"))


def _limit_reason(entries: int) -> str:
    return f"the recompile limit was hit earlier ({entries} entries)"


def _missed_limit(watch: LedgerWatch) -> str:
    """What is told of a limit that was raised, in another thread than the one that hits it."""
    other = watch.other_thread()
    missed = [setting for setting in other.missed if "recompile_limit" in setting]
    if not missed:
        return ""
    return f"; thread {other.name!r} did not get a setting: {', '.join(missed)}"


def enter_refrained_frame(watch: LedgerWatch, frame: Any) -> None:
    """A frame for which nothing compiled fits, and which the stance says not to compile.

    One that was never compiled is passed over, unless it is the rest of one that was: if no graph at all runs, the
    call that it belongs to is entered when it ends.
    """
    attempt = watch.functions.begin_attempt(frame, True)
    if not watch.thread.regions:
        return
    region = watch.thread.regions[-1]
    if attempt.resumed_at or cache_entries(frame.f_code):
        region.refrained = True
        watch.add(_eager_frame(attempt, _why_not_compiled(region), "stance"))


def _why_not_compiled(region: Region) -> str:
    from torch._dynamo import eval_frame

    if region.run_only:
        return "torch._dynamo.run runs only what is compiled, and none of it fits"
    return f"torch.compiler.set_stance({eval_frame._stance.stance!r}) is in force"


def enter_call_without_graph(watch: LedgerWatch, region: Region) -> None:
    """A call of a compiled callable ended, and no graph ran in it: say why, unless it raised."""
    if watch.on_purpose:
        return
    if region.raised:
        for ledger, _root in watch.ledgers:
            ledger.raised += 1
        return
    where = watch.place_of(region)
    switched_off = _switched_off(where, region)
    if switched_off is not None:
        # A frame of it that was told not to compile was entered when it happened.
        if not region.refrained:
            watch.add(switched_off)
        return
    if region.gave_up:
        # Entered when it happened. Torch says so once, and later calls run eagerly for the same reason.
        watch.given_up[where] = list(region.gave_up)
        return
    known = [eager for eager in region.quiet if (eager.function, eager.file, eager.line) == where][:1]
    known = known or watch.given_up.get(where, [])
    if known:
        watch.given_up[where] = known
        for eager in known:
            watch.add(replace(eager, calls=1))
        return
    # A coroutine's graphs run when it is awaited; that it has compiled code shows that they do.
    if not (runs_later(region.function) and cache_entries(code_of(region.function))):
        watch.add(_unexplained_call(watch, region, where))


def _switched_off(where: FunctionPlace, region: Region) -> EagerFrame | None:
    """Is it the stance in force, or the compiler's switch? (``torch._dynamo.config.disable``)."""
    from torch._dynamo import config, eval_frame

    if region.run_only or eval_frame._stance.stance != "default":
        return EagerFrame(*where, _why_not_compiled(region), "stance")
    if config.disable:
        return EagerFrame(*where, "torch._dynamo.config.disable is True (TORCH_COMPILE_DISABLE=1)", "off")
    return None


def _unexplained_call(watch: LedgerWatch, region: Region, where: FunctionPlace) -> EagerFrame:
    """No graph ran, and torch said nothing: a break without a graph, or torch gave up before the observation began."""
    from torch._dynamo import config

    function = region.function
    code = code_of(function)
    if is_disabled(function):
        return EagerFrame(*where, "torch.compiler.disable", "disabled")
    if where in watch.broken:
        return EagerFrame(*where, "a graph break left nothing of it to compile", "graph_break")
    if is_in_place(function) and is_torch(where.file):
        return EagerFrame(*where, IN_PLACE, "skipped")
    if why := why_never_seen(code):
        return EagerFrame(*where, why, "skipped")
    entries = len(cache_entries(code)) if code is not None else 0
    # A limit that was hit before the observation began leaves no other trace than as many entries.
    if entries >= config.recompile_limit:
        return EagerFrame(*where, _limit_reason(entries), "limit")
    return EagerFrame(*where, "no graph ran: a call before this observation gave the function up (an error was "
                              "suppressed, or a frame had no operator to compile)", "unknown")  # fmt: skip
