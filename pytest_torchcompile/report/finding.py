"""Finding: one thing that the gate has to say, and what it means for the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pytest_torchcompile.checks.severity import Severity
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.causes import Cause

__all__ = ["EXIT_CODES", "Finding", "Weight", "contradiction_finding", "exit_code", "foremost_findings"]

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
    cause: Cause | None = None
    """Why the cells fail, if that is what it tells."""
    severity: int = 0
    """A :class:`~pytest_torchcompile.checks.severity.Severity`; 0 where it tells nothing of a model."""

    @property
    def new(self) -> bool:
        """Is it a cause that was not there in the baseline?"""
        return self.cause is not None and self.cause.new

    @property
    def order(self) -> tuple[int, int, bool, int]:
        """Sorts findings: by what they mean for the exit code, then as causes are."""
        # The order of the exit codes is the order in which findings are told.
        weight = list(EXIT_CODES).index(self.weight)
        if self.cause is None:
            return weight, -self.severity, True, 0
        return weight, *self.cause.order

    @property
    def lines(self) -> list[str]:
        """What else is told of it, a line each."""
        if self.cause is None:
            return []
        news = ["new since the baseline"] * self.cause.new
        return [*news, *self.cause.further_lines()]


def contradiction_finding(noun: str, contradictions: Mapping[str, Sequence[str]], origin: str = "") -> Finding:
    """Cells or tests (``noun``) whose reports contradict themselves; the first is told in full.

    ``contradictions``: name to what contradicts itself in it, at least one of each. ``origin``: where the first stands.
    """
    name, texts = next(iter(contradictions.items()))
    place = f" of {origin}" if origin else ""
    text = f"{noun} {name}{place}: {texts[0]}"
    if len(contradictions) > 1:
        text += f" ({count(len(contradictions), noun)} contradict themselves)"
    return Finding("contradiction", "unusable", text, tuple(contradictions),
                   evidence="\n".join(texts[1:]), hint="use the report as the run wrote it")


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code that the findings amount to."""
    # What certainly failed outweighs what is missing.
    weights = {finding.weight for finding in findings}
    for weight, code in EXIT_CODES.items():
        if weight in weights:
            return code
    return 0


def foremost_findings(findings: Sequence[Finding], most: int) -> list[Finding]:
    """The first so many findings, and whichever of the others tells of wrong numbers: these no list cuts off."""
    chosen = list(findings[:most])
    for finding in findings[most:]:
        if finding.severity == Severity.WRONG_NUMBERS:
            chosen.append(finding)
    return chosen
