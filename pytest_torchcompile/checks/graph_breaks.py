"""graph_breaks: no more places where a graph ends early than the matrix allows (default: none)."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check
from pytest_torchcompile.checks.severity import EMPTY, RAISED
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["CHECK"]


_NOT_CONVERTED = "WON'T CONVERT"
_NOT_RESUMED = "Encountered graph break that we cannot resume from"
_RESUME = re.compile(r"torch_dynamo_resume_in_(\S+)_at_(\d+)")
"""How torch speaks of frames that it gives up (convert_frame.py, resume_execution.py; torch 2.8 to 2.15)."""
_CALLERS = 6
"""How many callers of a line are shown."""


def measure(run: CellTrial) -> dict[str, Any]:
    """The distinct places in user code where a graph broke."""
    error = run.compiled.error
    breaks = [found | {"source": linecache.getline(found["file"], found["line"]).strip()}
              for found in run.compiled.seen["graph_breaks"]]
    return {"raised": error.type if error else None, "graphs": len(run.compiled.seen["graphs"]),
            "graph_breaks": breaks}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``graph_breaks``, the largest number of places allowed."""
    breaks, most = section["graph_breaks"], limits.get("graph_breaks", 0)
    if len(breaks) > most:
        paste = f"if it is meant, allow it by the rule `- limits: {{graph_breaks: {len(breaks)}}}`"
        # A frame that was given up broke because of a break inside: the cause is told first.
        for found in sorted(breaks, key=_is_consequence):
            hint = _hint(found)
            yield Problem(
                f"graph break ({len(breaks)} place(s), {most:g} allowed): {_reason(found)}",
                evidence=_evidence(found), hint=f"{hint.rstrip('.')}; {paste}" if hint else paste,
                file=found["file"], line=found["line"],
            )
    elif section["raised"] or not section["graphs"]:
        # No graph, no break: silence about a run that compiled nothing would be a lie.
        why = f"{RAISED} {section['raised']}" if section["raised"] else "no graph was compiled"
        yield Problem(f"{EMPTY}: {why}", hint="see the check `compiles` of this cell")


def _is_consequence(found: Mapping[str, Any]) -> bool:
    """Whether torch gave up a frame, or the rest of one, because of a break that is told by itself."""
    return str(found["reason"]).startswith((_NOT_CONVERTED, _NOT_RESUMED))


def _hint(found: Mapping[str, Any]) -> str:
    """Torch's hint, and what came of it where it was tried."""
    hint = found.get("hint") or ""
    if tried := found.get("hint_tried"):  # older reports do not say
        return f"{tried}. Torch's hint: {hint}"
    return hint


def _reason(found: Mapping[str, Any]) -> str:
    """Torch's headline; where it names a function of its own making, what that is the rest of."""
    reason = str(found["reason"].splitlines()[0])
    if reason.startswith(_NOT_CONVERTED) and (rest := _RESUME.search(reason)):
        return f"the rest of {rest[1]} after the graph break at line {rest[2]} was given up"
    return reason


def _evidence(found: Mapping[str, Any]) -> str:
    """The place with its line of code, then who called it, the innermost first."""
    place = f"{found['file']}:{found['line']} ({found['owner']})"
    lines = [f"{place}  {found['gb_id']}" if found.get("gb_id") else place]
    if found.get("source"):  # older reports do not have it
        lines.append(f"    {found['source']}")
    if found.get("whole_frame") and found.get("gave_up"):
        lines.append(f"all of {found['gave_up']} ran eagerly because of it")
    callers = list(found.get("stack", ()))[1:]
    lines += [f"called by {caller}" for caller in callers[:_CALLERS]]
    return "\n".join(lines)


CHECK = Check("graph_breaks", measure, judge)
