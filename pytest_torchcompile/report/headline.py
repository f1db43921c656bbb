"""Headline: what is wrong, in one sentence of at most 25 words, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from pytest_torchcompile.checks.severity import Effect
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Cause

__all__ = ["WORDS", "headline", "shorten_to_headline"]

WORDS: Final = 25
"""The most words of a headline."""
_NAMES: Final = (12, 8, 5, 3, 2, 1)
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
    return list(dict.fromkeys(model for cause in causes for model in cause.models))


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
    for parts, names in product(range(len(groups), 0, -1), _NAMES):
        rest = sum(len(group.causes) for group in groups[parts:]) + others
        text = before + _sentence(groups[:parts], names, rest)
        if len(text.split()) <= WORDS:
            return text
    return shorten_to_headline(text)


def shorten_to_headline(text: str, less: int = 0) -> str:
    """The text, with no more words than a headline has, ``less`` so many that come after it."""
    words, most = text.split(), WORDS - less
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
