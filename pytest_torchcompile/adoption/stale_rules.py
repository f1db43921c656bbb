"""Stale rules: expected failures and limits that an earlier run needed and a later one does not. No torch.

Each rule is taken out of the matrix on trial, and the cells that it decided are judged again from their observations.
It goes where no cell of the later run misses it, while one of the earlier run would have failed without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.observation import BAD, Observation
from pytest_torchcompile.plan.matrix import Matrix, PlannedCell, parse_matrix
from pytest_torchcompile.plan.nodes import compose, offsets_of_entry
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.run.verdicts import apply_xfail, judge_observation

__all__ = ["StaleRule", "find_stale_rules", "without_stale_rules"]

_VERBS: Final = ("xfail", "limits")
"""Rules that allow something; the others choose what is run."""


@dataclass(frozen=True)
class StaleRule:
    """A rule that nothing needs any more."""

    where: str
    """``file:line``, by the file as it was given."""
    verb: str
    reason: str
    cells: tuple[str, ...]
    """Those that it decided, and that hold without it."""
    needed_by: tuple[str, ...]
    """Those of the earlier run that would have failed without it."""


def find_stale_rules(text: str, matrix: Matrix, shown: str, old: Merged, new: Merged) -> list[StaleRule]:
    """The rules to take out. ``text``: of the matrix file; ``matrix``: the same, read; ``shown``: its name."""
    return [rule for rule, _ in _tried_rules(text, matrix, shown, old, new)]


def without_stale_rules(text: str, matrix: Matrix, shown: str, old: Merged, new: Merged) -> str:
    """The text without the stale rules; every other character stays, comments too.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for a list of rules that is written in brackets.
    """
    for _, text_without in _tried_rules(text, matrix, shown, old, new):
        text = text_without
    return text


def _tried_rules(text: str, matrix: Matrix, shown: str, old: Merged, new: Merged) -> Iterator[tuple[StaleRule, str]]:
    """Each stale rule, and the text without it and without those that came before it here."""
    # From the last to the first, so that the lines of those that are still to be tried hold.
    for number in range(len(_entries(text, shown)) - 1, -1, -1):
        node = _entries(text, shown)[number]
        verb = next((key.value for key, _ in node.value if key.value in _VERBS), "")
        if not verb:
            continue
        trial = _without_entry(text, shown, number)
        try:
            edited = parse_matrix(trial.encode(), matrix.path, matrix.root, shown=shown)
        # A rule for a limit that only an `also` brings in, for example: it is not ours to take the file apart.
        except UsageError:
            continue
        reason = next((value.value for key, value in node.value if key.value == "reason"), "")
        found = _stale_rule(f"{shown}:{node.start_mark.line + 1}", verb, str(reason), matrix, edited, old, new)
        if found is not None:
            text, matrix = trial, edited
            yield found, text


def _entries(text: str, shown: str) -> list[yaml.MappingNode]:
    root = compose(text.encode(), shown)
    if not isinstance(root, yaml.MappingNode):
        return []
    section = next((value for key, value in root.value if key.value == "rules"), None)
    if not isinstance(section, yaml.SequenceNode):
        return []
    if section.flow_style and section.value:
        raise UsageError(f"{shown}:{section.start_mark.line + 1}: the rules are written in brackets, and such a list "
                         "is not edited: write each rule on lines of its own, behind a dash")
    return list(section.value)


def _without_entry(text: str, shown: str, number: int) -> str:
    entries = _entries(text, shown)
    start, end = offsets_of_entry(entries[number], text)
    new = ""
    # A key with nothing behind it would be another mistake.
    if len(entries) == 1:
        new = "  []\n"
    return text[:start] + new + text[end:]


def _stale_rule(where: str, verb: str, reason: str, matrix: Matrix, edited: Matrix, old: Merged,
                new: Merged) -> StaleRule | None:
    """The rule, if it is stale."""
    before = {each.cell.id: each for each in matrix.cells}
    decided = []
    for planned in edited.cells:
        was = before.get(planned.cell.id)
        if was is None:
            return None
        if (was.outcome, was.limits, was.checks) != (planned.outcome, planned.limits, planned.checks):
            decided.append(planned)
    ran = [planned for planned in decided if _was_judged(new.cells.get(planned.cell.id))]
    # Of a cell that the later run did not judge nobody knows whether it still needs the rule.
    if not ran or len(ran) < len(decided):
        return None
    if any(_needs_rule(new.cells[each.cell.id], before[each.cell.id], each) for each in ran):
        return None
    needed_by = []
    for planned in decided:
        name = planned.cell.id
        cell = old.cells.get(name)
        if cell is not None and _was_judged(cell) and _needs_rule(cell, before[name], planned):
            needed_by.append(name)
    if not needed_by:
        return None
    return StaleRule(where, verb, reason, tuple(planned.cell.id for planned in ran), tuple(needed_by))


def _was_judged(cell: Mapping[str, Any] | None) -> bool:
    if cell is None or not cell["selected"] or not cell["observation"]:
        return False
    return not {"skip", "not_run"}.intersection(check["verdict"] for check in cell["checks"].values())


def _needs_rule(cell: Mapping[str, Any], planned: PlannedCell, without: PlannedCell) -> bool:
    """Does a check fail without the rule that does not fail with it?"""
    return not _bad_checks(cell, without) <= _bad_checks(cell, planned)


def _bad_checks(cell: Mapping[str, Any], planned: PlannedCell) -> set[str]:
    """The checks that would fail under this plan."""
    names = [name for name in CHECKS if name in cell["checks"]]
    observation = Observation.from_dict(dict(cell["observation"]))
    judgements = apply_xfail(judge_observation(observation, names, planned.limits), planned)
    return {name for name, judgement in judgements.items() if judgement.verdict in BAD}
