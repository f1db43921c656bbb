"""Finding: one thing that the gate has to say, and what it means for the exit code. And the headline.

The headline is what is wrong, in one sentence of at most 25 words, the worst first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, TypeAlias

from pytest_torchcompile.checks.severity import Effect, Severity
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Cause

__all__ = [
    "EXIT_CODES", "HEADLINE_WORDS", "Finding", "Weight", "contradiction_finding", "exit_code", "foremost_findings",
    "headline", "shorten_to_headline",
]

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


# --------------------------------------------------------------------------------------------------------- the headline
HEADLINE_WORDS: Final = 25
"""The most words of a headline."""
_NAMED_MODELS: Final = (12, 8, 5, 3, 2, 1)
"""How many models are named, as far as there is room."""


@dataclass
class _Group:
    """Causes that do the same to their models."""

    effect: Effect
    causes: list[Cause]

    @property
    def models(self) -> list[str]:
        return _models_of(self.causes)

    @property
    def models_new(self) -> list[str]:
        """Models that it is new in."""
        return _models_of(cause for cause in self.causes if cause.new)

    def count_models(self) -> str:
        """``9 models have graph breaks``."""
        number = len(self.models)
        return f"{count(number, self.causes[0].noun)} {self.effect.of(number)}"

    def name_models(self, most: int) -> str:
        """``1 model computes wrong numbers (liar, new)``."""
        models, new = self.models, self.models_new
        details = [first_names(models, most)]
        first_cause = self.causes[0]
        # A test has its place in its name.
        if len(self.causes) == 1 and first_cause.problem.place and first_cause.noun == "model":
            details.append(first_cause.problem.place)
        if new:
            details.append("new" if len(new) == len(models) else f"{len(new)} new")
        return f"{self.count_models()} ({', '.join(details)})"


def _models_of(causes: Iterable[Cause]) -> list[str]:
    # In the order of the causes, and each once.
    models: dict[str, None] = {}
    for cause in causes:
        models.update(dict.fromkeys(cause.models))
    return list(models)


def headline(causes: Iterable[Cause], before: str = "", others: int = 0) -> str:
    """One sentence about some causes in their order; empty if there are none.

    Args:
        causes: What :func:`~pytest_torchcompile.report.causes.group_causes` returned.
        before: Words that it begins with.
        others: Findings that are no causes, and are counted only.
    """
    groups = list(_group_by_effect(causes))
    if not groups:
        return ""
    # As many effects as there is room for, then as many names of the worst one.
    for parts, names in product(range(len(groups), 0, -1), _NAMED_MODELS):
        rest = sum(len(group.causes) for group in groups[parts:]) + others
        text = before + _sentence(groups[:parts], names, rest)
        if len(text.split()) <= HEADLINE_WORDS:
            return text
    return shorten_to_headline(text)


def shorten_to_headline(text: str, less: int = 0) -> str:
    """The text, with no more words than a headline has, ``less`` so many that come after it."""
    words, most = text.split(), HEADLINE_WORDS - less
    return text if len(words) <= most else " ".join((*words[:most - 1], "..."))


def _group_by_effect(causes: Iterable[Cause]) -> Iterator[_Group]:
    # Tests and models are counted apart, because the sentence names them by one noun.
    by_effect: dict[tuple[Effect, str], list[Cause]] = {}
    for cause in causes:
        by_effect.setdefault((cause.effect, cause.noun), []).append(cause)
    for (effect, _), alike in by_effect.items():
        yield _Group(effect, alike)


def _sentence(groups: Sequence[_Group], names: int, others: int) -> str:
    first, *rest = groups
    parts = [first.name_models(names), *map(_Group.count_models, rest)]
    if others:
        parts.append(f"and {count(others, 'more finding')}")
    return "; ".join(parts)
