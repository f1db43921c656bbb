"""determinism: several processes, in which Python orders sets otherwise, compile the model to the same code.

Where they do not, caches miss in each process, ranks may wait for each other for ever, and numbers differ from run to
run in their last bits. The usual cause is a graph that is built or changed in the order of a set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.checks.check import Check, not_run, unjudged
from pytest_torchcompile.gauges.code_pieces import (
    COMPILED_STAGES,
    NOTHING,
    CodePiece,
    changed_pairs,
    difference_lines,
    graph_pieces,
)
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

_HASH_SEEDS: Final = (1, 2, 3, 4, 5)
"""Two seeds order a set of two texts alike half the time, five of them one time in sixteen. Kernels are built once, so
that each seed after the first costs what tracing and writing code cost."""
_SHOWN: Final = 3
"""Pieces that are shown with what differs."""
_ORDER: Final = "look for a set, or a dict filled from one, that decides about an order, and sort it"
_HINTS: Final = {
    "dynamo": f"Dynamo's graph already differs, so the model's own Python makes it: {_ORDER}",
    "joint": f"Dynamo's graph is the same and AOTAutograd's is not: {_ORDER}, in a backend or an operator's "
             "decomposition or gradient",
    "forward": f"the joint graph is the same and its partition is not: {_ORDER}, in a partitioner or a pass on graphs",
    "backward": f"the joint graph is the same and its partition is not: {_ORDER}, in a partitioner or a pass on graphs",
    "post_grad": f"what AOTAutograd gives to Inductor is the same: {_ORDER}, in a pass before code is generated",
    "code": "Inductor's graphs are the same and its code is not: kernels that are chosen by timing differ so, too; "
            "else report it to PyTorch",
}


def measure(run: CellTrial) -> dict[str, Any]:
    """What several processes made of the cell, and where one differs from the first; the others are not asked then."""
    if run.compiled.error or run.side is None:
        return not_run(run)
    section: dict[str, Any] = {"raised": None, "failure": "", "graphs": 0, "kernels": 0, "changed": [], "begins": "",
                               "processes": 1}
    first_seed, *others = _HASH_SEEDS
    first = run.compile_apart(first_seed)
    section["failure"] = first["failure"]
    old = _pieces_of(first["graphs"])
    section["graphs"] = sum(piece.kind == "graph" for piece in old)
    section["kernels"] = sum(piece.kind == "kernel" for piece in old)
    for seed in others:
        # What failed once, or differs once, need not be compiled again.
        if section["failure"] or section["changed"] or not old:
            break
        now = run.compile_apart(seed)
        section["processes"] += 1
        section["failure"] = now["failure"]
        if not now["failure"]:
            section["changed"] = _changed_pieces(first, now, (first_seed, seed))
            section["begins"] = _first_stage(first["stages"], now["stages"])
    return section


def _changed_pieces(
    first: Mapping[str, Any], second: Mapping[str, Any], seeds: tuple[int, int]
) -> list[dict[str, Any]]:
    """Each graph and kernel that two processes have made otherwise, with the lines that differ."""
    changed = []
    for before, now in changed_pairs(_pieces_of(first["graphs"]), _pieces_of(second["graphs"])):
        piece = now or before or NOTHING
        lines = difference_lines(_text_of(before, first["texts"]), _text_of(now, second["texts"]),
                                 *(f"PYTHONHASHSEED={seed}" for seed in seeds))
        changed.append({"kind": piece.kind, "name": piece.name, "difference": lines})
    return changed


def _pieces_of(graphs: list[dict[str, Any]]) -> list[CodePiece]:
    pieces: list[CodePiece] = []
    for graph in graphs:
        pieces += graph_pieces(graph["graph"], graph["key"], [(name, key) for name, key in graph["kernels"]])
    # What differs in a kernel tells more than what calls it.
    return sorted(pieces, key=lambda piece: piece.kind != "kernel")


def _text_of(piece: CodePiece | None, texts: Mapping[str, str]) -> str:
    return "" if piece is None else texts[piece.key]


def _first_stage(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """The first stage of the compiler in which the two differ; empty where none does."""
    for stage in COMPILED_STAGES:
        if first.get(stage) != second.get(stage):
            return stage
    return ""


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; takes no limits."""
    if section["raised"]:
        yield from unjudged(section)
    elif section["failure"]:
        yield Problem("nothing to judge: another process could not compile the model, though the cell's own did",
                      section["failure"])
    # Two processes that compile nothing compile the same.
    elif not section["graphs"]:
        yield Problem("nothing to judge: no graph was compiled in another process",
                      hint="see the check `compiles` of this cell")
    elif changed := section["changed"]:
        names = ", ".join(f"{each['kind']} {each['name']}" for each in changed[:_SHOWN])
        more = "" if len(changed) <= _SHOWN else f" and {len(changed) - _SHOWN} more"
        evidence = []
        for each in changed[:_SHOWN]:
            evidence += [f"{each['kind']} {each['name']}", *each["difference"]]
        yield Problem(f"two processes compiled it to different code: {names}{more}", "\n".join(evidence),
                      _HINTS.get(section["begins"], _ORDER))


def remark(section: Mapping[str, Any]) -> str:
    """What was compared."""
    graphs, kernels = count(section["graphs"], "graph"), count(section["kernels"], "kernel")
    # Reports of the time when there were two do not say so.
    return f"{graphs} and {kernels} are the same in {section.get('processes', 2)} processes"


CHECK = Check("determinism", measure, judge, remark)
