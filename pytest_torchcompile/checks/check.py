"""What a check is: something measured in the rank, and a judgement made of it anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.severity import EMPTY
from pytest_torchcompile.observation import RAISED, Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["Check", "not_run", "unjudged"]


def _no_remark(section: Mapping[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class Check:
    """A statement that must hold of every cell."""

    name: str
    measure: Callable[[CellTrial], dict[str, Any]]
    """Runs in the rank process: what was seen, as JSON-able data. Judges nothing."""
    judge: Callable[[Mapping[str, Any], Mapping[str, float]], Iterable[Problem]]
    """(section, limits) -> problems. Pure, without torch: a stored section can be judged again."""
    remark: Callable[[Mapping[str, Any]], str] = _no_remark
    """What is worth knowing of a section without problems, in one line; as pure."""


def not_run(run: CellTrial) -> dict[str, Any]:
    """The section of a check that takes further steps of the compiled model, where there is none that runs."""
    error = run.compiled.error
    return {"raised": error.type if error else "nothing"}


def unjudged(section: Mapping[str, Any]) -> list[Problem]:
    """The one problem of a section whose compiled run raised, so that there is nothing to judge."""
    if not section.get("raised"):
        return []
    return [Problem(f"{EMPTY}: {RAISED} {section['raised']}",
                    hint="see the check `compiles` of this cell")]
