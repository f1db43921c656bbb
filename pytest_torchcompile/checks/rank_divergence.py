"""rank_divergence: every rank compiled the same, at the same time. Cells of several ranks only.

Ranks that run one program and compile differently are a hang waiting to happen: where one compiles again and the other
does not, the code of one may call a collective that the other's does not have, or meet it minutes later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["CHECK"]


def measure(run: CellTrial) -> dict[str, Any]:
    """What this rank compiled in which call, how often its graphs ran, and the collectives that it began."""
    from pytest_torchcompile.wrappers.process_group import count_collectives

    seen, error = run.compiled.seen, run.compiled.error
    return {
        "raised": error.type if error else None,
        "alike": run.wrapper.alike,
        "compiles": [{key: each[key] for key in _SHOWN} for each in seen["compiles"]],
        "graphs": len(seen["graphs"]),
        "runs": sum(graph["runs"] for graph in seen["graphs"]),
        "graph_breaks": len(seen["graph_breaks"]),
        "collectives": count_collectives() if run.job.world > 1 else {},
    }


_SHOWN = ("during", "function", "file", "line", "compile_id", "kind", "cause", "reason", "ops")


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of the sections of all ranks.

    :func:`~pytest_torchcompile.ranks.blame.cell_observation` has put the sections together.
    """
    ranks = section.get("ranks", [])
    if missing := [r for r, rank in enumerate(ranks) if rank is None]:
        yield Problem(f"nothing to judge: rank {', '.join(map(str, missing))} has recorded nothing",
                      hint="see the check `compiles` of this cell")
        return
    for r, rank in enumerate(ranks):
        if problem := next(iter(unjudged(rank)), None):
            yield Problem(f"rank {r}: {problem.message}", hint=problem.hint)
            return
    if len(ranks) < 2 or not any(rank["graphs"] for rank in ranks):
        yield Problem("nothing to judge: "
                      + ("no rank has compiled a graph" if ranks[1:] else "the observation is not of several ranks"),
                      hint="see the check `compiles` of this cell")
        return
    yield from _compiles(ranks, section["alike"])
    if section["alike"]:  # stages of a pipeline send and receive different numbers of times
        yield from _counts(ranks)
        yield from _collectives(ranks)


def _compiles(ranks: list[Mapping[str, Any]], alike: bool) -> Iterator[Problem]:
    """The first call in which some rank compiled otherwise than rank 0.

    Of ranks that run unlike programs it is only asked whether all or none compile again.
    """
    calls = list(dict.fromkeys(each["during"] for rank in ranks for each in rank["compiles"]))
    for call in calls:
        here = [[each for each in rank["compiles"] if each["during"] == call
                 and (alike or each["kind"] == "recompile")] for rank in ranks]
        keys = [Counter(_what(each) for each in found) if alike else bool(found) for found in here]
        other = next((r for r, key in enumerate(keys) if key != keys[0]), None)
        if other is None:
            continue
        evidence = "\n".join(f"rank {r}: {_line(each)}" if found else f"rank {r}: compiled nothing"
                             for r, found in enumerate(here) for each in found or [{}])
        first = next(each for found in (here[other], here[0]) for each in found)
        yield Problem(f"rank {other} compiled otherwise than rank 0 in {call}: {len(here[other])} and {len(here[0])} "
                      "compile(s)", evidence,
                      "give every rank batches of the same shapes, and keep the rank's number out of what the model "
                      "branches on; else a rank waits in a collective for one that compiles",
                      first["file"], first["line"])
        return


def _what(each: Mapping[str, Any]) -> tuple[Any, ...]:
    # Dynamo's operators, which older reports lack: what DTensor makes of them may differ, where sizes divide unevenly.
    return each["function"], each["line"], each["compile_id"], each["kind"], each["cause"], each.get("ops")


def _line(each: Mapping[str, Any]) -> str:
    why = f": {each['cause']}, {each['reason']}" if each.get("reason") else ""
    size = f" of {each['ops']} operators" if each.get("ops") is not None else ""
    return f"{each['function']} {each['file']}:{each['line']}  {each['compile_id']} {each['kind']}{size}{why}"


_COUNTED = {"graphs": "graphs", "runs": "runs of compiled graphs", "graph_breaks": "graph breaks"}


def _counts(ranks: list[Mapping[str, Any]]) -> Iterator[Problem]:
    for key, name in _COUNTED.items():
        counts = [rank[key] for rank in ranks]
        if len(set(counts)) > 1:
            yield Problem(f"the ranks differ in their number of {name}: "
                          + ", ".join(f"rank {r} has {count}" for r, count in enumerate(counts)))


def _collectives(ranks: list[Mapping[str, Any]]) -> Iterator[Problem]:
    counts = [rank["collectives"] for rank in ranks]
    if any(count != counts[0] for count in counts):
        yield Problem("the ranks began different numbers of collectives: "
                      + "; ".join(f"rank {r}: " + (", ".join(f"{n} in {g}" for g, n in c.items()) or "none")
                                  for r, c in enumerate(counts)))


CHECK = Check("rank_divergence", measure, judge)
