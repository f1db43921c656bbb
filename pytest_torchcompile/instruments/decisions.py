"""From what Dynamo decided for a frame to the records of the ledger."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.instruments import users
from pytest_torchcompile.instruments.attempts import Attempt, Region
from pytest_torchcompile.instruments.causes import classify
from pytest_torchcompile.instruments.graph_breaks import headline
from pytest_torchcompile.instruments.records import Compile, EagerFrame, Failure

if TYPE_CHECKING:
    from pytest_torchcompile.instruments.watch import Watch

__all__ = ["decided", "left", "raised"]

_SOFT: Final = ("Unsupported", "UserError")  # ConvertFrame.__call__ in torch/_dynamo/convert_frame.py
_LIMIT: Final = re.compile(r"(recompile|cache)[ _](size )?limit", re.I)
_OTHER_BACKEND: Final = "BACKEND_MATCH"


def raised(watch: Watch, attempt: Attempt, error: BaseException) -> None:
    """A compile that raised to the caller."""
    if attempt.metrics:
        where = (attempt.function, attempt.file, attempt.line)
        compile_id = attempt.metrics.get("compile_id") or ""
        watch.add(Failure(*where, compile_id, type(error).__name__, str(error)))


def decided(watch: Watch, attempt: Attempt, result: Any) -> None:
    """A compile that ended: compiled code, or an eager frame. One that was never traced says nothing."""
    if result.guarded_code is not None:
        watch.add(_compile(attempt, str(result.guarded_code.compile_id)))
        return
    eager = _eager(attempt, getattr(result, "skip_reason", None) or "")
    if eager is None:
        return
    if watch.thread.regions:
        watch.thread.regions[-1].gave_up.append(eager)
    if eager.kind != "empty":  # alone no fault; `left` judges the whole call
        watch.add(eager)


def _compile(attempt: Attempt, compile_id: str) -> Compile:
    metrics = attempt.metrics
    own = tuple(r for r in attempt.reasons if not r.startswith(_OTHER_BACKEND))
    first = next(iter(own), "" if attempt.reasons else metrics.get("recompile_reason") or "")
    if first:
        kind = "recompile"
    elif attempt.resumed_at:
        kind = "resume"
    else:
        kind = "instance" if attempt.cached else "first"
    return Compile(
        attempt.function, attempt.file, attempt.line, compile_id, kind,
        reason=first, cause=classify(first) if first else "", all_reasons=attempt.reasons,
        graphs=attempt.graphs, ops=attempt.ops, guards=metrics.get("guard_count") or 0,
        seconds=(metrics.get("duration_us") or 0) / 1e6, resumed_at=attempt.resumed_at,
        caches=tuple(attempt.caches),
    )


def _eager(attempt: Attempt, skip_reason: str) -> EagerFrame | None:
    metrics = attempt.metrics
    where = (attempt.function, attempt.file, attempt.line)
    if "disabled for this frame" in skip_reason:
        return EagerFrame(*where, skip_reason, "disabled")
    if not metrics:  # torch's own frames, or no tensor in reach
        return None
    fail_type, why = metrics.get("fail_type"), metrics.get("fail_reason") or ""
    if fail_type is None:
        why = headline(skip_reason.partition("tracing: ")[2])
        return EagerFrame(*where, why or "no operator traced", "empty")
    if attempt.reasons and _LIMIT.search(headline(why)):
        return EagerFrame(*where, f"{headline(why)}; last guard that failed: {attempt.reasons[0]}", "limit")
    if fail_type in _SOFT:
        return EagerFrame(*where, headline(why), "graph_break")
    return EagerFrame(*where, f"{fail_type}: {' '.join(why.split())}", "suppressed")


def left(watch: Watch, region: Region) -> None:
    """A call of a compiled callable ended. If no graph ran in it, say why."""
    error = sys.exc_info()[1]
    if watch.thread.runs > region.runs_before or (error is not None and error is not region.error_before):
        return
    function = region.frame.f_locals.get("fn")
    where = users.of_callable(function)
    if (temporary := _switched_off(region, where)) is not None:
        watch.add(temporary)
    elif region.gave_up:
        watch.given_up[where] = region.gave_up
        for eager in region.gave_up:
            if eager.kind == "empty":
                watch.add(eager)
    else:
        for eager in watch.given_up.get(where) or [_unknown(function, where)]:
            watch.add(replace(eager, calls=1))


def _switched_off(region: Region, where: tuple[str, str, int]) -> EagerFrame | None:
    """Is it the stance in force, or the compiler's switch? (``torch._dynamo.config.disable``)."""
    from torch._dynamo import config

    if region.stance != "default":
        return EagerFrame(*where, f"torch.compiler.set_stance({region.stance!r}) is in force", "stance")
    if config.disable:
        return EagerFrame(*where, "torch._dynamo.config.disable is True (TORCH_COMPILE_DISABLE=1)", "off")
    return None


def _unknown(function: Any, where: tuple[str, str, int]) -> EagerFrame:
    """Torch gave up before the observation began. The number of cached entries tells a limit from others."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import config

    code = users.code_of(function)
    entries = len(_debug_get_cache_entry_list(code)) if code is not None else 0
    if entries >= config.recompile_limit:
        return EagerFrame(*where, f"the recompile limit was hit earlier ({entries} entries)", "limit")
    return EagerFrame(*where, "no graph ran: an earlier call gave this function up (an error was suppressed, "
                              "a frame had no operator to compile, or it is disabled)", "skipped")
