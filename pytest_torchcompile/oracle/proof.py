"""Proof: did compiled code run, and could its results have told anything? No torch.

Every verdict on a compiled model rests on this. The record is plain data, so that a stored one can be judged again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.ledger.records import EAGER_WITHOUT_WORDS, SILENT, part_of
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["compiled_code_ran", "doubts", "eager_frames", "graph_runs", "proof"]


def proof(trial: Trial) -> dict[str, Any]:
    """What a run shows: graphs with how often each ran, frames that ran eagerly, calls whose outputs are all zero."""
    seen = trial.compiled.seen
    # A call that raises has no output.
    judged = [passed for passed in trial.passed if not passed.raised]
    return {
        "graphs": seen["graphs"],
        "eager_frames": seen["eager_frames"],
        "lost": seen["lost"],
        "all_zero": [passed.zero for passed in judged],
        "eager_all_zero": [passed.eager_zero for passed in judged],
    }


def compiled_code_ran(sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Did any graph that was compiled run? Also for a run that was ended before its section was complete."""
    return _any_graph_ran(sections.get("compiles", {}))


def _any_graph_ran(section: Mapping[str, Any]) -> bool:
    return any(graph["runs"] for graph in section.get("graphs", ()))


def graph_runs(seen: Mapping[str, Any]) -> int:
    """How often compiled graphs ran, all of them together; of a ledger or a section as plain data."""
    return sum(graph["runs"] for graph in seen["graphs"])


def doubts(section: Mapping[str, Any]) -> Iterator[Problem]:
    """What keeps a run from proving anything about compiled code; nothing if it does prove something."""
    if not section["graphs"]:
        yield Problem("nothing was compiled: no graph reached the backend",
                      evidence=eager_frames(section),
                      hint=_why_nothing(section))
        return
    if not _any_graph_ran(section):
        yield Problem("graphs were compiled, but none was ever executed", evidence=eager_frames(section))
    else:
        yield from _silent_frames(section)
    if section["lost"]:
        yield Problem("the ledger could not read everything that torch reported, so it can't vouch for this cell",
                      evidence="\n".join(section["lost"]),
                      hint="this torch is newer than pytest-torchcompile knows: please report it")
    if section["all_zero"] and all(section["all_zero"]):
        text = "every output of the compiled model is zero, NaN or infinite"
        if all(section["eager_all_zero"]):
            text = "every output is zero, NaN or infinite, compiled and eager: their equality proves nothing"
        yield Problem(text, hint="give the model inputs and weights that reach its outputs")


def _why_nothing(section: Mapping[str, Any]) -> str:
    if any(frame["kind"] == "skipped" for frame in section["eager_frames"]):
        return ("torch.compile leaves code of torch's own classes eager where it is compiled in place: give the blocks "
                "a class of your own, whose forward calls the one of torch's class")
    return EAGER_WITHOUT_WORDS


def _silent_frames(section: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each place where frames ran eagerly and torch said nothing."""
    by_place: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for frame in section["eager_frames"]:
        if frame["kind"] in SILENT:
            by_place.setdefault((frame["file"], frame["line"]), []).append(frame)
    for (file, line), here in by_place.items():
        kinds, part = ", ".join(sorted({frame["kind"] for frame in here})), here[0]["function"]
        if all(frame.get("resumed_at") for frame in here):
            part = f"the rest of {part} behind a graph break"
        yield Problem(f"{len(here)} frame(s) silently ran eagerly: {kinds} in {part}",
                      evidence=eager_frames(section), file=file, line=line)


def eager_frames(section: Mapping[str, Any]) -> str:
    """A line for each frame that ran eagerly."""
    lines = []
    for frame in section["eager_frames"]:
        part = part_of(frame["function"], frame.get("resumed_at", 0))
        lines.append(f"{part}  {frame['file']}:{frame['line']}  {frame['kind']}: {frame['reason']}")
    return "\n".join(lines)
