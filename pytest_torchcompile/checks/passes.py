"""passes: of a cell of the toolkit, each graph pass leaves what the graph before it computes, within rounding noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.pass_records import PassStep

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

_SHOWN = 6
"""Values that the evidence of a step shows in full, or names."""


def measure(run: CellTrial) -> dict[str, Any]:
    """Each step of the toolkit: capture, decompositions, passes. Forgets what was compiled."""
    from pytest_torchcompile.oracle.pass_steps import judge_steps

    judged = judge_steps(run)
    return {"passes": [step.to_dict() for step in judged.steps], "remarks": list(judged.remarks)}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """A problem for each step that changed a value, or with which the model raises. Takes no limits."""
    if not section.get("passes"):
        yield Problem("no step of the toolkit was judged: no call of the model ran eagerly")
        return
    for step in _steps(section):
        if step.problem:
            yield Problem(step.problem, evidence=_evidence(step),
                          hint="Toolkit(dump=FOLDER) writes the graph before and after each pass, and the difference")


def _steps(section: Mapping[str, Any]) -> list[PassStep]:
    return [PassStep.from_dict(step) for step in section.get("passes", ())]


def _evidence(step: PassStep) -> str:
    lines = [f"{wrong.text}\n    in {wrong.call}" for wrong in step.wrong[:_SHOWN]]
    if names := [wrong.name for wrong in step.wrong[_SHOWN:]]:
        lines.append(f"{len(names)} more: {', '.join(names[:2 * _SHOWN])}")
    return "\n".join(lines)


def remark(section: Mapping[str, Any]) -> str:
    """How far a table moves the numbers, its operators, which passes changed no graph, and what calls cannot show."""
    told = [step.remark for step in _steps(section)]
    return "; ".join(filter(None, [*told, *section.get("remarks", ())]))


CHECK = Check("passes", measure, judge, remark)
