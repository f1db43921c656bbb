"""Findings: what is wrong with a trial, one for each cause and place, however many calls show it. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.limits import Limits, problem

__all__ = ["Finding", "findings", "headline"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """A kind of :data:`~pytest_torchcompile.oracle.leaf.KINDS`, or ``vacuous``: no compiled code was judged."""
    where: str
    """The output, gradient, buffer, ... as ``output['logits']`` or ``gradient of up.weight``."""
    message: str
    evidence: str = ""
    """The calls that show it; for an error its text and stack."""
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}", *(f"    {line}" for line in self.evidence.splitlines())]
        return "\n".join(lines + ([f"    try: {self.hint}"] if self.hint else []))


def findings(leaves: Iterable[tuple[str, Leaf]], limits: Limits | None = None) -> list[Finding]:
    """One finding for each leaf and kind that is a problem in some call, in the order of the first."""
    leaves = list(leaves)
    if limits is None:
        limits = Limits().over(leaf for _, leaf in leaves)
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for label, leaf in leaves:
        text = problem(leaf, limits)
        if text:
            found.setdefault((leaf.kind, leaf.name), []).append((label, text))
    return [Finding(kind, name, shown[0][1], _calls([label for label, _ in shown]))
            for (kind, name), shown in found.items()]


def _calls(labels: list[str]) -> str:
    return f"in {labels[0]}" + (f", and in {len(labels) - 1} more call(s)" if labels[1:] else "")


def headline(text: str) -> str:
    """The first line of an error's text; where that only leads up to the next one, that one too."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    told = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return told if len(told) <= 200 else f"{told[:197]}..."
