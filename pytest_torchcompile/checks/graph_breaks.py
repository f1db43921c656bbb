"""graph_breaks: no more places where a graph ends early than the matrix allows (default: none)."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check
from pytest_torchcompile.checks.compiles import coverage_beside_breaks
from pytest_torchcompile.checks.severity import EMPTY
from pytest_torchcompile.ledger.records import NOT_CONVERTED
from pytest_torchcompile.observation import RAISED, Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

# How torch speaks of a frame that it gives up behind a break (resume_execution.py; torch 2.8 to 2.15).
_NOT_RESUMED = "Encountered graph break that we cannot resume from"
_RESUME = re.compile(r"torch_dynamo_resume_in_(\S+)_at_(\d+)")
_CALLERS = 6
"""How many callers of a line are shown."""
_WITHOUT_CELLS = "take such cells out by a rule `- exclude:` or `- xfail:`, with a reason"


def measure(run: CellTrial) -> dict[str, Any]:
    """The distinct places in user code where a graph broke."""
    error = run.compiled.error
    breaks = []
    for each in run.compiled.seen["graph_breaks"]:
        source = linecache.getline(each["file"], each["line"]).strip()
        breaks.append(each | {"source": source})
    return {"raised": error.type if error else None, "graphs": len(run.compiled.seen["graphs"]),
            "graph_breaks": breaks, "coverage_needed": coverage_beside_breaks(run),
            "whole": bool(run.settings.get("fullgraph"))}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``graph_breaks``, the largest number of places allowed."""
    breaks, most = section["graph_breaks"], limits.get("graph_breaks", 0)
    if len(breaks) > most:
        paste = _allowing_rule(len(breaks), section)
        # A frame that was given up broke because of a break inside: the cause is told first.
        for each in sorted(breaks, key=_is_consequence):
            hint = _torch_hint(each).rstrip(".")
            yield Problem(
                f"graph break ({len(breaks)} place(s), {most:g} allowed): {_short_reason(each)}",
                evidence=_place_and_callers(each), hint="; ".join(filter(None, (hint, paste))),
                file=each["file"], line=each["line"],
            )
    elif section["raised"] or not section["graphs"]:
        # No graph, no break: silence about a run that compiled nothing would be a lie.
        why = "no graph was compiled"
        if section["raised"]:
            why = f"{RAISED} {section['raised']}"
        yield Problem(f"{EMPTY}: {why}", hint="see the check `compiles` of this cell")


def _allowing_rule(count: int, section: Mapping[str, Any]) -> str:
    """The rule that allows so many breaks, or what there is instead where none can be."""
    # Older reports do not say whether the model has to be one graph.
    if section.get("whole"):
        return ("no limit allows a break here, for the cell takes the whole model as one graph: mend the line, or "
                f"{_WITHOUT_CELLS}")
    if not section["graphs"] and not section["raised"]:
        return ("no limit makes this cell pass, for nothing is compiled: put what breaks into a function under "
                f"torch.compiler.disable, so that the rest is compiled, or {_WITHOUT_CELLS}")
    text = f"if it is meant, allow it by the rule `- limits: {{graph_breaks: {count}}}`"
    # Nor whether it needs that too.
    if (share := section.get("coverage_needed")) is not None:
        text += (f" and, for torch gave up whole functions because of it, `- limits: {{coverage: {share:.4g}}}` "
                 "(both lines)")
    return text


def _is_consequence(graph_break: Mapping[str, Any]) -> bool:
    """Whether torch gave up a frame, or the rest of one, because of a break that is told by itself."""
    return str(graph_break["reason"]).startswith((NOT_CONVERTED, _NOT_RESUMED))


def _torch_hint(graph_break: Mapping[str, Any]) -> str:
    """Torch's hint, and what came of it where it was tried."""
    hint = graph_break.get("hint") or ""
    # Older reports do not say whether it was.
    tried = str(graph_break.get("hint_tried") or "")
    if not tried:
        return hint
    if "does not help" not in tried:
        return f"{tried}. Torch's hint: {hint}"
    # What was tried in vain is not advised in the same breath.
    if "capture_scalar_outputs" in hint:
        return f"{tried}: keep the number a tensor, by torch.where, or by torch.cond where it decides a branch"
    return tried


def _short_reason(graph_break: Mapping[str, Any]) -> str:
    """Torch's headline; where it names a function of its own making, what that is the rest of."""
    reason = str(graph_break["reason"].splitlines()[0])
    if reason.startswith(NOT_CONVERTED) and (rest := _RESUME.search(reason)):
        return f"the rest of {rest[1]} after the graph break at line {rest[2]} was given up"
    # The headline says how torch goes on, and not what was in its way.
    if reason.startswith(_NOT_RESUMED) and (why := graph_break.get("explanation")):
        first_line = why.splitlines()[0].rstrip(".")
        return f"{first_line}; torch cannot resume after it, so the rest of the function ran eagerly"
    return reason


def _place_and_callers(graph_break: Mapping[str, Any]) -> str:
    """The place with its line of code, then who called it, the innermost first."""
    place = f"{graph_break['file']}:{graph_break['line']} ({graph_break['owner']})"
    if graph_break.get("gb_id"):
        place += f"  {graph_break['gb_id']}"
    lines = [place]
    # Older reports do not have the line of code.
    if graph_break.get("source"):
        lines.append(f"    {graph_break['source']}")
    if graph_break.get("whole_frame") and graph_break.get("gave_up"):
        lines.append(f"all of {graph_break['gave_up']} ran eagerly because of it")
    callers = list(graph_break.get("stack", ()))[1:]
    lines += [f"called by {caller}" for caller in callers[:_CALLERS]]
    return "\n".join(lines)


CHECK = Check("graph_breaks", measure, judge)
