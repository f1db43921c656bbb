"""compiles: the cell compiled and ran compiled. Every other verdict of the cell rests on this one.

Nothing vacuous: graphs were compiled and executed in every call, no frame silently ran eagerly, the outputs
are not all zero, and the share of the model's operator calls that ran inside compiled graphs is as high as promised.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.checks.check import Check
from pytest_torchcompile.checks.numerics import located_stage, tried_remedy
from pytest_torchcompile.checks.severity import BESIDE_BREAKS, SLOW_GUARDS, UNCOVERED
from pytest_torchcompile.errors import headline
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.observation import RAISED, Problem
from pytest_torchcompile.oracle.discrepancies import own_draws_text
from pytest_torchcompile.oracle.proof import doubts, eager_frames, proof

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK", "broken_library", "coverage_beside_breaks"]

_BROKEN: Final = re.compile(r"(/\S+\.so): (?:file too short|invalid ELF header)")
"""What the system's loader says of a library that the linker did not finish."""
_EAGERS_DRAWS: Final = ("the other checks have Inductor draw eager's numbers, and so it compiles: "
                        "`torch._inductor.config.fallback_random = True` does the same in production")


def measure(run: Trial) -> dict[str, Any]:
    """Compiled frames and graphs, frames that ran eagerly, coverage per call, the error if there was one."""
    from pytest_torchcompile.ledger.break_sites import raising_line

    seen, error = run.compiled.seen, run.compiled.error
    return {
        "compiles": seen["compiles"],
        "coverage": run.compiled.coverage,
        "breaks": len(seen["graph_breaks"]),
        "wrapper": run.wrapping,
        **proof(run),
        "error": error.to_dict() if error else None,
        "raised_at": raising_line(error.exception, run.root) if error else None,
        "seconds": run.seconds.get("compiled"),
    }


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``coverage``, the smallest share allowed.

    By default it is 1. What an allowed graph break leaves to eager needs no lower one (:func:`_breaks_explain`).
    """
    if error := section["error"]:
        yield _raised_problem(section, error)
        return
    # The proof comes before the share: of a run that compiled nothing a coverage means nothing.
    yield from doubts(section)
    yield from _judge_own_draws(section.get("own_draws"))
    # Of silent frames the coverage, which is measured after all calls, tells only what comes of them.
    yield from _judge_guards(section, limits)
    silent = any(frame["kind"] in SILENT for frame in section["eager_frames"])
    if section["graphs"] and not silent and not _breaks_explain(section, limits):
        beside = f" {BESIDE_BREAKS}" if _are_allowed(section, limits) else ""
        yield from _judge_coverage(section, limits.get("coverage", 1.0), beside)


def _raised_problem(section: Mapping[str, Any], error: Mapping[str, Any]) -> Problem:
    """The compiled run raised: where, and which stage of the compiler, if that was found out."""
    # Older reports do not say where it was raised.
    evidence, file, line = _evidence_of(error, section.get("raised_at"))
    if library := broken_library(error["text"]):
        return Problem(f"{RAISED} {error['type']} in {error['phase']}: a broken file in torch's cache, {library}",
                       evidence=evidence, file=file, line=line,
                       hint="a compile that was interrupted left it so, which says nothing of the model: "
                            f"`rm {library}`, and run again")
    hint = tried_remedy(section)
    if not section.get("located"):
        hint = "the same call with backend='eager' and then 'aot_eager' tells which stage raises"
    return Problem(
        f"{RAISED} {error['type']} in {error['phase']}; eager did not: {headline(error['text'])}",
        evidence=evidence + located_stage(section), hint=hint, file=file, line=line,
    )


def _evidence_of(error: Mapping[str, Any], raised_at: Sequence[Any] | None) -> tuple[str, str, int]:
    """The text and the stack of an error, with the user's operator before them; and the operator's file and line.

    ``raised_at``: file, line and source of the operator; None where no graph tells.
    """
    evidence = f"{error['text']}\n{error['traceback']}"
    file, line, source = raised_at or ("", 0, "")
    if file:
        evidence = f"the operator comes from {file}:{line}\n    {source}\n{evidence}"
    return evidence.strip(), file, line


def broken_library(text: str) -> str:
    """The compiled library that cannot be loaded, for its compile was interrupted; empty where that is not why.

    >>> broken_library("ImportError: /tmp/torchinductor_me/zt/c1.main.so: file too short")
    '/tmp/torchinductor_me/zt/c1.main.so'
    """
    found = _BROKEN.search(text)
    return found[1] if found else ""


def _breaks_explain(section: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether what ran eagerly lies between graphs, at breaks that the limit ``graph_breaks`` allows.

    Not where a limit asks for a share, nor where torch gave up whole frames because of a break.
    """
    asked = limits.get("coverage", 1.0) < 1
    return _are_allowed(section, limits) and not asked and not _gave_up_frames(section["eager_frames"])


def _are_allowed(section: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether graphs broke, and no more often than the limit allows."""
    # Older reports do not count the breaks.
    breaks: int = section.get("breaks", 0)
    return 0 < breaks <= limits.get("graph_breaks", 0)


def _gave_up_frames(eager_frames: Iterable[Mapping[str, Any]]) -> bool:
    """Whether torch gave up whole frames because of a break."""
    return any(frame["kind"] == "graph_break" for frame in eager_frames)


def coverage_beside_breaks(run: Trial) -> float | None:
    """The limit ``coverage`` that a cell needs beside one for its graph breaks; None where that one is enough."""
    if not run.compiled.coverage or not _gave_up_frames(run.compiled.seen["eager_frames"]):
        return None
    return _as_limit(min(map(itemgetter("share"), run.compiled.coverage)))


def _as_limit(share: float) -> float:
    """Rounded down, so that as a limit it passes."""
    return math.floor(share * 10_000) / 10_000


def _judge_coverage(section: Mapping[str, Any], least: float, beside: str) -> Iterator[Problem]:
    """``beside``: what is allowed and made whole frames run eagerly; empty where nothing is."""
    if not section["coverage"]:
        return
    # By call, and the lowest: the average of many sizes would hide one that runs eagerly.
    low = min(section["coverage"], key=itemgetter("share"))
    if low["share"] < least:
        share = _as_limit(low["share"])
        yield Problem(
            f"only {share:.4g} {UNCOVERED}{beside} at {low['call']}, "
            f"{least:.4g} wanted ({low['outside']} of {low['total']} ran eagerly)",
            evidence="\n".join((*low.get("sites", ()), eager_frames(section))).strip(),
            hint=f"{_why_eager(section)}; if it is meant, allow it by the rule `- limits: {{coverage: {share:.4g}}}`",
        )


def guard_microseconds(compiles: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """By function, how long asking all guards of its compiled code takes, as torch measured each when it was made."""
    taken: Counter[str] = Counter()
    for compiled in compiles:
        function = f"{compiled['function']} ({compiled['file']}:{compiled['line']})"
        # Reports of early versions do not have it.
        taken[function] += compiled.get("guard_microseconds", 0)
    return dict(taken)


def _judge_guards(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    most = limits.get("guard_us")
    if most is None:
        return
    taken = guard_microseconds(section["compiles"])
    # Guards of one function add up over its entries, so the limit is on functions.
    slow = {name: cost for name, cost in taken.items() if cost > most}
    if slow:
        name, cost = max(slow.items(), key=itemgetter(1))
        guards = sum(compiled["guards"] for compiled in section["compiles"])
        yield Problem(
            f"{SLOW_GUARDS} {name} take {cost} µs, {most:g} wanted",
            evidence="\n".join([f"{guards} guards in all", *(f"{each}: {slow[each]} µs" for each in slow)]),
            hint="`pytest-torchcompile explain` lists the guards, which torch asks in every call: fewer modules and "
                 "attributes in a frame, or fewer compiled entries of one function, mean fewer",
        )
    elif not any(taken.values()):
        yield Problem(f"{SLOW_GUARDS} all functions are unknown: this torch does not measure them",
                      hint="torch 2.9 and later do; leave the limit guard_us out")


def _judge_own_draws(drawn: Mapping[str, Any] | None) -> Iterator[Problem]:
    """What production would meet: the same calls with random numbers that Inductor draws itself."""
    text = own_draws_text(drawn)
    if drawn is None or not text:
        return
    if error := drawn["error"]:
        evidence, file, line = _evidence_of(error, drawn["raised_at"])
    else:
        evidence, file, line = "\n".join(drawn["silent"]), "", 0
    yield Problem(text, evidence=evidence, hint=_EAGERS_DRAWS, file=file, line=line)


def remark(section: Mapping[str, Any]) -> str:
    """Names the settings that a thread which compiled did not get, and how random numbers were drawn."""
    remarks = []
    for compiled in section.get("compiles", ()):
        if compiled.get("missed"):
            remarks.append(f"thread {compiled['thread']!r} compiled without settings: {'; '.join(compiled['missed'])}")
            break
    if drawn := section.get("own_draws"):
        remarks.append(_remark_own_draws(drawn))
    return "; ".join(remarks)


def _remark_own_draws(drawn: Mapping[str, Any]) -> str:
    if not drawn["tried"]:
        return ("the model draws random numbers, here eager's own; what Inductor makes of them by default is tried in "
                "cells of one rank alone")
    # Older reports have it judged in no cell.
    if drawn.get("judged"):
        return ("the model draws random numbers: Inductor's own, as production has them; eager was given the same, so "
                "that values were compared")
    return (f"the model draws random numbers: with Inductor's own, as production has them, {drawn['calls']} call(s) "
            "ran too; their distribution is judged by the check `randomness`")


def _why_eager(section: Mapping[str, Any]) -> str:
    if section.get("breaks"):
        return "graph_breaks lists where"
    wrapper = section.get("wrapper", "none")
    if wrapper != "none":
        return (f"no graph broke: the wrapper {wrapper} runs operators of its own, or layers around those that it "
                "compiles, outside of all graphs")
    return "no graph broke: torch does not compile the functions that ran these operators"


CHECK = Check("compiles", measure, judge, remark)
