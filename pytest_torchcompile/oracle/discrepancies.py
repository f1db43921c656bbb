"""Discrepancies: what is wrong with a trial, one for each kind and place, and what it could not decide. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_torchcompile.errors import headline
from pytest_torchcompile.observation import RAISED
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, note, problem

__all__ = ["NOT_HELD", "WITH_OWN_NUMBERS", "Discrepancy", "find_discrepancies", "never_repeats", "own_draws_text",
           "undecided_notes", "why_vacuous"]

NOT_HELD = ("what is held of a call when the next one runs was not compared: CUDA graphs write to the same memory "
            "again, and a copy is up to the caller")
WITH_OWN_NUMBERS = "with Inductor's own random numbers"
"""Said of a run whose compiled code draws as production's does."""
_VALUES = frozenset({"value", "gradient", "buffer", "mutation", "nondeterministic"})
# What is said of a leaf by ``Leaf.against``, where that fell short of a float64 run with noise at every operator.
_SHORT_OF_FLOAT64 = {
    "float32": "measured from a float32 run, not from a float64 one",
    "float64-inputs": "noise was drawn on parameters and inputs, not at every operator",
    "eager-draws": "measured from eager itself; noise was drawn on its parameters and inputs",
    "eager-only": "measured from eager itself, with a tolerance made from the dtype",
}


@dataclass(frozen=True)
class Discrepancy:
    """One thing that is wrong."""

    kind: str
    """A kind of :data:`~pytest_torchcompile.oracle.leaf_limits.KINDS`, or ``vacuous``: no compiled code was judged."""
    where: str
    """The output, gradient, buffer, ... as ``output['logits']`` or ``gradient of up.weight``."""
    message: str
    evidence: str = ""
    """The calls that show it; for an error its text and stack."""
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}"]
        lines += [f"    {line}" for line in self.evidence.splitlines()]
        if self.hint:
            lines.append(f"    try: {self.hint}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Statement:
    """A text and the labels of the calls that it is about."""

    text: str
    labels: list[str]


def find_discrepancies(leaves: Iterable[tuple[str, Leaf]], limits: Limits | None = None) -> list[Discrepancy]:
    """One for each leaf and kind that is a problem in some call, in the order of the first."""
    leaves = list(leaves)
    if limits is None:
        limits = Limits().over(leaf for _, leaf in leaves)
    by_place: dict[tuple[str, str], _Statement] = {}
    for label, leaf in leaves:
        text = problem(leaf, limits)
        if text:
            by_place.setdefault((leaf.kind, leaf.name), _Statement(text, [])).labels.append(label)
    discrepancies = []
    for (kind, name), statement in by_place.items():
        discrepancies.append(Discrepancy(kind, name, statement.text, _calls_as_evidence(statement.labels)))
    return discrepancies


def _calls_as_evidence(labels: list[str]) -> str:
    if len(labels) == 1:
        return f"in {labels[0]}"
    return f"in {labels[0]}, and in {len(labels) - 1} more call(s)"


def undecided_notes(leaves: Iterable[tuple[str, Leaf]]) -> list[str]:
    """One line for each leaf that could not be decided, and for each way of measuring that fell short of float64.

    ``leaves`` come with the label of their call, which a line gives for the first of several.
    """
    notes: dict[str, _Statement] = {}
    for label, leaf in leaves:
        if leaf.against in _SHORT_OF_FLOAT64 and leaf.numerical:
            text = _SHORT_OF_FLOAT64[leaf.against]
            if leaf.why:
                text += f" ({leaf.why})"
            notes.setdefault(f"{leaf.against}: {leaf.why}", _Statement(text, [])).labels.append(label)
        if text_of_leaf := note(leaf):
            notes.setdefault(leaf.name, _Statement(text_of_leaf, [])).labels.append(label)
    return [f"{statement.text}, in {_first_of_calls(statement.labels)}" for statement in notes.values()]


def _first_of_calls(labels: Iterable[str]) -> str:
    first, *others = dict.fromkeys(labels)
    return f"{first} and {len(others)} more" if others else first


def own_draws_text(drawn: Mapping[str, Any] | None) -> str:
    """What production would meet where Inductor draws the random numbers itself, in words; '' where all is well.

    ``drawn``: what :func:`~pytest_torchcompile.oracle.own_draws.compile_with_own_draws` has returned; None where there
    was nothing to try, and in reports of earlier versions.
    """
    if drawn is None or not drawn["tried"]:
        return ""
    if error := drawn["error"]:
        found = (f"{RAISED} {error['type']} in {error['phase']} of {drawn['call']}: "
                 f"{headline(error['text'])}")
    elif not drawn["graphs"]:
        found = "nothing was compiled"
    elif drawn["silent"]:
        found = f"{len(drawn['silent'])} function(s) silently ran eagerly"
    else:
        return ""
    return f"{WITH_OWN_NUMBERS}, as in production, {found}"


def why_vacuous(leaves: Sequence[tuple[str, Leaf]]) -> str | None:
    """Say why a comparison proves nothing although nothing is wrong, or ``None``: every value is undecidable."""
    values = _compared_values(leaves)
    if not values or any(leaf.decided for leaf in values):
        return None
    if never_repeats(leaves):
        return f"eager does not repeat itself: two runs differ by more than rounding in all {len(values)} values"
    return f"all {len(values)} values are nothing but rounding noise, so that any others would have passed too"


def never_repeats(leaves: Sequence[tuple[str, Leaf]]) -> bool:
    """Whether eager does not repeat itself in any value that was compared."""
    values = _compared_values(leaves)
    return bool(values) and all(leaf.kind == "nondeterministic" for leaf in values)


def _compared_values(leaves: Sequence[tuple[str, Leaf]]) -> list[Leaf]:
    return [leaf for _, leaf in leaves if leaf.kind in _VALUES and leaf.numel]
