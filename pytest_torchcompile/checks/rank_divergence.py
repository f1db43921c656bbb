"""rank_divergence: every rank compiled the same, at the same time. Cells of several ranks only.

Ranks that run one program and compile differently are a hang waiting to happen: where one compiles again and the other
does not, the code of one may call a collective that the other's does not have, or meet it minutes later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, unjudged
from pytest_torchcompile.checks.severity import EMPTY
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.proof import graph_runs

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]


def measure(run: CellTrial) -> dict[str, Any]:
    """What this rank compiled in which call, how often its graphs ran, and the collectives that it began."""
    from pytest_torchcompile.wrappers.process_group import count_collectives

    seen, error = run.compiled.seen, run.compiled.error
    return {
        "raised": error.type if error else None,
        "alike": run.wrapper.spread.alike,
        "compiles": list(map(_shown_of_compile, seen["compiles"])),
        "graphs": len(seen["graphs"]),
        "runs": graph_runs(seen),
        "graph_breaks": len(seen["graph_breaks"]),
        "collectives": count_collectives() if run.job.world > 1 else {},
    }


def _shown_of_compile(compiled: Mapping[str, Any]) -> dict[str, Any]:
    return {key: compiled[key] for key in _SHOWN}


_SHOWN = ("during", "function", "file", "line", "compile_id", "kind", "cause", "reason", "ops")


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of the sections of all ranks.

    :func:`~pytest_torchcompile.ranks.rank_group.cell_observation` has put the sections together.
    """
    ranks = section.get("ranks", [])
    missing = [str(number) for number, rank in enumerate(ranks) if rank is None]
    if missing:
        yield Problem(f"{EMPTY}: rank {', '.join(missing)} has recorded nothing", hint=_SEE_COMPILES)
        return
    for number, rank in enumerate(ranks):
        for problem in unjudged(rank):
            yield Problem(f"rank {number}: {problem.message}", hint=problem.hint)
            return
    if len(ranks) < 2:
        yield Problem(f"{EMPTY}: the observation is not of several ranks", hint=_SEE_COMPILES)
    elif not any(rank["graphs"] for rank in ranks):
        yield Problem(f"{EMPTY}: no rank has compiled a graph", hint=_SEE_COMPILES)
    else:
        yield from _judge_compiles(ranks, section["alike"])
        # Stages of a pipeline send and receive different numbers of times.
        if section["alike"]:
            yield from _judge_counts(ranks)
            yield from _judge_collectives(ranks)


_SEE_COMPILES = "see the check `compiles` of this cell"


def _judge_compiles(ranks: list[Mapping[str, Any]], alike: bool) -> Iterator[Problem]:
    """The first call in which some rank compiled otherwise than rank 0.

    Of ranks that run unlike programs it is only asked whether all or none compile again.
    """
    # In the order of the calls: what comes after the first difference may only follow from it.
    calls: dict[str, None] = {}
    for rank in ranks:
        calls |= dict.fromkeys(each["during"] for each in rank["compiles"])
    for call in calls:
        by_rank = [_compiles_of(rank, call, alike) for rank in ranks]
        if alike:
            keys: list[Any] = [Counter(map(_comparable, compiles)) for compiles in by_rank]
        else:
            keys = [bool(compiles) for compiles in by_rank]
        for other, key in enumerate(keys):
            if key != keys[0]:
                yield _divergence_problem(call, by_rank, other)
                return


def _compiles_of(rank: Mapping[str, Any], call: str, alike: bool) -> list[Mapping[str, Any]]:
    compiles = [each for each in rank["compiles"] if each["during"] == call]
    if alike:
        return compiles
    return [each for each in compiles if each["kind"] == "recompile"]


def _divergence_problem(call: str, by_rank: list[list[Mapping[str, Any]]], other: int) -> Problem:
    lines = []
    for number, compiles in enumerate(by_rank):
        lines += [f"rank {number}: {_compile_line(each)}" for each in compiles]
        if not compiles:
            # It is often the one that the others wait for.
            lines.append(f"rank {number}: compiled nothing")
    first = (by_rank[other] or by_rank[0])[0]
    return Problem(
        f"rank {other} compiled otherwise than rank 0 in {call}: {len(by_rank[other])} and {len(by_rank[0])} "
        "compile(s)", "\n".join(lines),
        "give every rank batches of the same shapes, and keep the rank's number out of what the model "
        "branches on; else a rank waits in a collective for one that compiles",
        first["file"], first["line"])


def _comparable(each: Mapping[str, Any]) -> tuple[Any, ...]:
    # Dynamo's operators, which older reports lack: what DTensor makes of them may differ, where sizes divide unevenly.
    return each["function"], each["line"], each["compile_id"], each["kind"], each["cause"], each.get("ops")


def _compile_line(each: Mapping[str, Any]) -> str:
    line = f"{each['function']} {each['file']}:{each['line']}  {each['compile_id']} {each['kind']}"
    if each.get("ops") is not None:
        line += f" of {each['ops']} operators"
    if each.get("reason"):
        line += f": {each['cause']}, {each['reason']}"
    return line


_COUNTED = {"graphs": "graphs", "runs": "runs of compiled graphs", "graph_breaks": "graph breaks"}


def _judge_counts(ranks: list[Mapping[str, Any]]) -> Iterator[Problem]:
    for key, name in _COUNTED.items():
        counts = [rank[key] for rank in ranks]
        if len(set(counts)) > 1:
            shown = ", ".join(f"rank {number} has {count}" for number, count in enumerate(counts))
            yield Problem(f"the ranks differ in their number of {name}: {shown}")


def _judge_collectives(ranks: list[Mapping[str, Any]]) -> Iterator[Problem]:
    by_rank = [rank["collectives"] for rank in ranks]
    if all(collectives == by_rank[0] for collectives in by_rank):
        return
    shown = []
    for number, collectives in enumerate(by_rank):
        counts = [f"{count} in {group}" for group, count in collectives.items()]
        shown.append(f"rank {number}: {', '.join(counts) or 'none'}")
    yield Problem(f"the ranks began different numbers of collectives: {'; '.join(shown)}")


CHECK = Check("rank_divergence", measure, judge)
