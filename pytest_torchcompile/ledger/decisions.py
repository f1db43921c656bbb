"""From what Dynamo decided for a frame to the records of the ledger."""

from __future__ import annotations

import re
import threading
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger import guard_values as values
from pytest_torchcompile.ledger.break_text import headlines, is_limit, parse_break
from pytest_torchcompile.ledger.entries import cache_entries, commonest_reason, guards_of, nearest_reason
from pytest_torchcompile.ledger.guard_causes import classify_guard
from pytest_torchcompile.ledger.in_progress import Attempt, Region
from pytest_torchcompile.ledger.reasons import Reason, read_reason, split_reasons, user_expression
from pytest_torchcompile.ledger.records import Compile, EagerFrame, Failure
from pytest_torchcompile.ledger.refusals import IN_PLACE, in_place, never_seen, refused
from pytest_torchcompile.ledger.sites import is_torch
from pytest_torchcompile.ledger.stages import seconds_in
from pytest_torchcompile.ledger.users import code_of, is_disabled, runs_later

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import Place, Watch

__all__ = [
    "enter_call_without_graph", "enter_decision", "enter_failed_compile", "enter_limited_call", "enter_refrained_frame",
    "read_failed_guards",
]  # fmt: skip

_SOFT: Final = ("Unsupported", "UserError")  # never raised to the user (ConvertFrame.__call__)


def read_failed_guards(attempt: Attempt, payload: str | None) -> tuple[Reason, ...]:
    """The failed guards of each cached entry, with the value that each of them met."""
    found = []
    for reason in map(read_reason, split_reasons(payload)):
        what, expected, actual = reason.what, reason.expected, reason.actual
        if not what:
            what, expected, actual = values.changed_state(reason.guard)
        elif not actual:
            actual = values.actual_value(what, attempt.scope())
        if attempt.code[0] != attempt.file:  # torch's own frame around a module calls it fn
            what = re.sub(r"^fn\b", "self", what)
        # What lay on Python's stack when the graph broke, such as the result of the call that broke it.
        what = re.sub(r"\b___stack\d+\b", f"(value at line {attempt.resumed_at})", what)
        found.append(replace(reason, what=user_expression(what), expected=user_expression(expected), actual=actual))
    return tuple(found)


def enter_failed_compile(watch: Watch, attempt: Attempt, error: BaseException) -> None:
    """A compile that raised to the caller; with fullgraph=True a graph break does."""
    if not attempt.metrics:
        return
    compile_id = attempt.metrics.get("compile_id") or ""
    if type(error).__name__ == "Unsupported" and not attempt.breaks:
        _break(watch, attempt, compile_id, str(error), getattr(error, "real_stack", None))
    watch.add(Failure(*attempt.where, compile_id, type(error).__name__, str(error)))


def _break(watch: Watch, attempt: Attempt, compile_id: str, message: str, stack: Any) -> None:
    """A graph break that torch has no record of, in the words of one."""
    user = "".join(traceback.format_list(stack)) if stack else _failed_at(attempt)
    text = f"Graph Break Reason: {message.partition('from user code')[0]}\nUser code traceback:\n{user}"
    outermost = (attempt.file, attempt.line, attempt.function)
    for ledger, root in watch.ledgers:
        found = parse_break(text, root=root, during=ledger.label, compile_id=compile_id, traced=attempt.code,
                      lines=attempt.lines, outermost=outermost)  # fmt: skip
        attempt.breaks.append(ledger.add(found))


def _failed_at(attempt: Attempt) -> str:
    """The line at which torch gave a frame up, as a traceback writes it (``CompilationMetrics``, 2.8 to 2.15)."""
    file, line = attempt.metrics.get("fail_user_frame_filename"), attempt.metrics.get("fail_user_frame_lineno")
    if not file or not line:
        return ""
    inside = file == attempt.code[0] and attempt.lines[0] <= line <= attempt.lines[1]
    return f'  File "{file}", line {line}, in {attempt.code[1] if inside else "?"}\n'


def enter_decision(watch: Watch, attempt: Attempt, result: Any) -> None:
    """A compile that ended: compiled code, or an eager frame. One that was never traced says nothing."""
    if result.guarded_code is not None:
        if not attempt.heard:
            watch.note_loss(f"{attempt.function} was compiled without a record: something took the handler from the "
                            "logger torch.__trace")
        raced = watch.lost_race(attempt, result.guarded_code)
        reason = Reason("") if raced else _telling(attempt, result.guarded_code)
        watch.add(_compile(attempt, str(result.guarded_code.compile_id), reason, raced))
        watch.finished[id(attempt.frame_code)] = (threading.get_ident(), time.perf_counter())
        return
    why = getattr(result, "skip_reason", None) or ""
    eager, loud = _eager(attempt, why) if attempt.metrics else refused(watch, attempt, why)
    if eager is None:
        return
    if not loud:
        if watch.thread.regions:
            watch.thread.regions[-1].quiet += (eager,)
        return
    if eager.kind == "graph_break" and attempt.metrics:
        if not attempt.breaks:
            message = attempt.metrics.get("fail_reason") or ""
            _break(watch, attempt, attempt.metrics.get("compile_id") or "", message, None)
        for found in attempt.breaks[-len(watch.ledgers) :]:
            found.whole_frame, found.gave_up = True, attempt.function
    watch.give_up(attempt, eager)


def _telling(attempt: Attempt, made: Any) -> Reason:
    """Why a compile was needed: of several cached entries, what the nearest one lacked."""
    if not attempt.reasons and (text := attempt.metrics.get("recompile_reason")):
        return read_reason(text)
    if len(attempt.reasons) < 2 or attempt.frame_code is None:
        return nearest_reason(attempt.reasons, (), {})
    known = {str(entry.compile_id): guards_of(entry.guard_manager) for entry in cache_entries(attempt.frame_code)}
    return nearest_reason(attempt.reasons, guards_of(made.guard_manager), known)


def _compile(attempt: Attempt, compile_id: str, first: Reason, raced: bool) -> Compile:
    metrics = attempt.metrics
    kind = "recompile" if first.guard else "resume" if attempt.resumed_at else "first"
    if raced:
        kind = "raced"
    elif (attempt.cached or attempt.reasons) and not first.guard:
        kind = "instance"
    if compile_id.startswith("!") and not first.guard:  # compiled autograd traces a backward as a frame of its own
        kind = "backward"
    path, _, line = first.at.rpartition(":")
    return Compile(
        *attempt.where, compile_id, kind, reason=first.guard,
        cause=classify_guard(first.guard, attempt.freevars, first.actual) if first.guard else "",
        all_reasons=tuple(r.guard for r in attempt.reasons),
        what=first.what, expected=first.expected, actual=first.actual, source=first.source,
        at=f"{attempt.file}:{line}" if path and attempt.file.endswith(path) else first.at,
        advice=first.advice,
        graphs=attempt.graphs, ops=attempt.ops, guards=metrics.get("guard_count") or 0,
        seconds=(metrics.get("duration_us") or 0) / 1e6, seconds_in=seconds_in(metrics),
        resumed_at=attempt.resumed_at,
        caches=tuple(attempt.caches),
    )  # fmt: skip


def _eager(attempt: Attempt, skip_reason: str) -> tuple[EagerFrame, bool]:
    """A frame that torch traced and gave up; and whether that alone is to be entered."""
    fail_type, why = attempt.metrics.get("fail_type"), attempt.metrics.get("fail_reason") or ""
    if fail_type is None and attempt.breaks and not skip_reason:
        # Torch 2.8 to 2.10 give up a frame at a break in a loop, also in what the loop calls, and do not say so.
        why = f"{attempt.breaks[-1].reason}; then torch gave all of it up, as for a break in a loop"
        return EagerFrame(*attempt.where, why, "graph_break"), True
    if fail_type is None:
        why = " ".join(headlines(skip_reason.partition("tracing: ")[2]))
        return EagerFrame(*attempt.where, why or "no operator traced", "empty"), False
    if attempt.reasons and is_limit(why):
        guard = commonest_reason(attempt.reasons).guard
        return EagerFrame(*attempt.where, f"{headlines(why)[0]}; a guard that failed: {guard}", "limit"), True
    if fail_type in _SOFT:
        return EagerFrame(*attempt.where, "; then ".join(headlines(why)), "graph_break"), True
    return EagerFrame(*attempt.where, f"{fail_type}: {' '.join(why.split())}", "suppressed"), True


def enter_limited_call(watch: Watch, attempt: Attempt) -> None:
    """One more call of a frame that hit its recompile limit, now or before the observation began."""
    count = len(cache_entries(attempt.frame_code)) if attempt.frame_code else 0
    reason = f"the recompile limit was hit earlier ({count} entries)"
    watch.give_up(attempt, EagerFrame(*attempt.where, reason, "limit"))


def enter_refrained_frame(watch: Watch, frame: Any) -> None:
    """A frame for which nothing compiled fits, and which the stance says not to compile.

    One that was never compiled is passed over, unless it is the rest of one that was: if no graph at all runs, the
    call that it belongs to is entered when it ends.
    """
    attempt = watch.functions.attempt(frame, True)
    region = watch.thread.regions[-1] if watch.thread.regions else None
    if region is None or not (attempt.resumed_at or cache_entries(frame.f_code)):
        return
    region.refrained = True
    watch.add(EagerFrame(*attempt.where, _not_to_compile(region), "stance"))


def _not_to_compile(region: Region) -> str:
    from torch._dynamo import eval_frame

    if region.run_only:
        return "torch._dynamo.run runs only what is compiled, and none of it fits"
    return f"torch.compiler.set_stance({eval_frame._stance.stance!r}) is in force"


def enter_call_without_graph(watch: Watch, region: Region) -> None:
    """A call of a compiled callable ended, and no graph ran in it: say why, unless it raised."""
    if watch.on_purpose:
        return
    if region.raised:
        for ledger, _root in watch.ledgers:
            ledger.raised += 1
        return
    where = watch.callable_place(region)
    quiet = [eager for eager in region.quiet if (eager.function, eager.file, eager.line) == where]
    if (temporary := _switched_off(where, region)) is not None:
        if not region.refrained:  # else entered when it happened
            watch.add(temporary)
    elif region.gave_up:  # entered when it happened
        watch.given_up[where] = list(region.gave_up)
    elif known := quiet[:1] or watch.given_up.get(where, []):
        watch.given_up[where] = known
        for eager in known:
            watch.add(replace(eager, calls=1))
    elif not (runs_later(region.function) and cache_entries(code_of(region.function))):
        watch.add(_unknown(watch, region, where))


def _switched_off(where: Place, region: Region) -> EagerFrame | None:
    """Is it the stance in force, or the compiler's switch? (``torch._dynamo.config.disable``)."""
    from torch._dynamo import config, eval_frame

    if region.run_only or eval_frame._stance.stance != "default":
        return EagerFrame(*where, _not_to_compile(region), "stance")
    if config.disable:
        return EagerFrame(*where, "torch._dynamo.config.disable is True (TORCH_COMPILE_DISABLE=1)", "off")
    return None


def _unknown(watch: Watch, region: Region, where: Place) -> EagerFrame:
    """No graph ran, and torch said nothing: a break without a graph, or torch gave up before the observation began."""
    from torch._dynamo import config

    function = region.function
    code = code_of(function)
    if is_disabled(function):
        return EagerFrame(*where, "torch.compiler.disable", "disabled")
    if where in watch.broken:
        return EagerFrame(*where, "a graph break left nothing of it to compile", "graph_break")
    if in_place(function) and is_torch(where[1]):
        return EagerFrame(*where, IN_PLACE, "skipped")
    if why := never_seen(code):
        return EagerFrame(*where, why, "skipped")
    entries = len(cache_entries(code)) if code is not None else 0
    if entries >= config.recompile_limit:
        return EagerFrame(*where, f"the recompile limit was hit earlier ({entries} entries)", "limit")
    return EagerFrame(*where, "no graph ran: a call before this observation gave the function up (an error was "
                              "suppressed, or a frame had no operator to compile)", "unknown")  # fmt: skip
