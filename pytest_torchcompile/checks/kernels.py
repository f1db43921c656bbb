"""kernels: what Inductor generated for the cell's graphs, and how much of it.

Fewer kernels are better fusion: a limit keeps a change of the model, or of torch, from losing it unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.runner import Run

__all__ = ["CHECK"]

SHOWN = 20


def measure(run: Run) -> dict[str, Any]:
    """The kernels of each graph, with the operators fused in them, and the calls that no kernel was generated for."""
    from pytest_torchcompile.instruments.kernels import kernels, operators

    error = run.compiled.error
    return {"raised": error.type if error else None,
            "graphs": [found.to_dict() for found in kernels(run.texts, operators())]}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``kernels``, the most that may be generated."""
    if section["raised"]:
        yield from unjudged(section)
        return
    most, count = limits.get("kernels"), sum(len(graph["generated"]) for graph in section["graphs"])
    if most is None:
        return
    if not section["graphs"]:
        yield Problem(f"Inductor generated nothing, so the limit of {most:g} kernels says nothing",
                      hint="only the backend inductor has kernels: give the rule `when: {backend: inductor}`")
    elif count > most:
        lines = [f"graph {graph['compile_id']} ({graph['stage']}): {kernel['name']}: {', '.join(kernel['ops'])}"
                 for graph in section["graphs"] for kernel in graph["generated"]]
        more = [f"and {count - SHOWN} more"] if count > SHOWN else []
        yield Problem(f"kernels that Inductor generated: {count}, at most {most:g} allowed",
                      "\n".join(lines[:SHOWN] + more),
                      "what keeps operators apart is a graph break, a mutation or a library call between them; "
                      "`TORCH_LOGS=fusion` tells why two were not fused")


CHECK = Check("kernels", measure, judge)
