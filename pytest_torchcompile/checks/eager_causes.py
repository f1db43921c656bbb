"""Eager causes: what of a model runs outside of compiled code, or is compiled again, from a section of `worth`.

Of the functions here each gives a cause with the line, torch's reason there, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pytest_torchcompile.checks.step_evidence import SlowCause, part_of_step
from pytest_torchcompile.layer.benchmark_result import NOTHING
from pytest_torchcompile.ledger.eager_reasons import break_reason, eager_reason
from pytest_torchcompile.ledger.records import OverLimit
from pytest_torchcompile.quantity import count

__all__ = ["late_compiles", "little_compiled", "nothing_compiled", "over_limit"]

COVERED: Final = 0.9
"""With a smaller share of operator calls in graphs, little was compiled."""
LONGEST_REASON: Final = 200


def over_limit(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Functions that torch has given up, for they were compiled too often, with what runs eagerly in all."""
    coverage = section.get("coverage")
    outside = None if coverage is None else 1 - float(coverage)
    share = 1.0 if outside is None else outside
    if outside and section.get("profile"):
        share = part_of_step(section, "operators") + part_of_step(section, "python")
    for over in section.get("over_limit", ()):
        yield SlowCause("recompiles", share, OverLimit(**over).told(outside))


def late_compiles(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """What compiled in the timed steps, where no step should."""
    late = section.get("late")
    if not late:
        return
    first = late[0]
    # The first few are kept, and all are counted.
    compiles = count(section.get("late_compiles") or len(late), "compile")
    what = f" because of {first['what']}" if first["what"] else _failed_guard(first)
    yield SlowCause(
        "recompiles", 1.0,
        f"{compiles} in the timed steps: {first['function']} ({first['file']}:{first['line']}) is compiled "
        f"again{what}: {first['advice']}",
    )  # fmt: skip


def _failed_guard(late: Mapping[str, Any]) -> str:
    """Torch's own words, where no variable is known that changed; a kind of reason tells nobody what to do."""
    if reason := " ".join(str(late.get("reason", "")).split()):
        return f" because a guard failed: {reason[:LONGEST_REASON]}"
    known = late["cause"] and late["cause"] != "other"
    return f" because of its {late['cause']}" if known else ""


def nothing_compiled(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Why no compiled code ran at all, where none did; a function that was given up for its recompiles says more."""
    if section["verdict"] == NOTHING and not section.get("over_limit"):
        why = eager_reason(section.get("breaks", ()), section.get("eager_frames", ()))
        yield SlowCause("coverage", 1.0, f"no operator call ran in a compiled graph: {why.what}: {why.remedy}")


def little_compiled(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """How much ran outside of compiled graphs, where that is much, and why."""
    coverage, breaks = section.get("coverage"), section.get("breaks", ())
    if coverage is None or coverage >= COVERED:
        return
    place, remedy = "", "see the check `compiles` for what stayed outside"
    if breaks:
        why = break_reason(breaks[0])
        place, remedy = f"; the first graph break is at {why.what}", why.remedy
    elif frames := section.get("eager_frames", ()):
        why = eager_reason((), frames)
        place, remedy = f"; {why.what}", why.remedy
    outside = part_of_step(section, "operators") + part_of_step(section, "python")
    yield SlowCause(
        "coverage", outside, f"{1 - coverage:.0%} of the operator calls run outside of compiled graphs{place}: {remedy}"
    )
