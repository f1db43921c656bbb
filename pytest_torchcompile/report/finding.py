"""Finding: one thing that the gate has to say, and what it means for the exit code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

__all__ = ["EXIT_CODES", "Finding", "Weight", "exit_code", "first"]

Weight: TypeAlias = Literal["fail", "unusable", "nothing", "note"]

EXIT_CODES: Final[dict[Weight, int]] = {"fail": 1, "unusable": 2, "nothing": 3, "note": 0}
"""In the order that decides: what certainly failed is told before what is missing, so that a CI which runs again on 2
does not run a failure again."""


@dataclass(frozen=True)
class Finding:
    """One thing that the gate has to say."""

    kind: str
    """A check, a limit, or ``missing``, ``partial``, ``skip``, ``gate``, ``pass_rate``, ``baseline``, ...; one word."""
    weight: Weight
    text: str
    cells: tuple[str, ...] = ()
    file: str = ""
    """The user's file behind it, or the policy's."""
    line: int = 0
    evidence: str = ""
    hint: str = ""
    """What to do; several lines where it is something to paste."""


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code that the findings amount to."""
    weights = {finding.weight for finding in findings}
    return next((code for weight, code in EXIT_CODES.items() if weight in weights), 0)


def first(names: Iterable[Any], shown: int = 3) -> str:
    """The first few of some names, and how many more there are."""
    names = list(map(str, names))
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
