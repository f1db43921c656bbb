"""The ratchet: a policy file is made as strict as what was measured, never less strict. Comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.policy_limits import Slack, slack_numbers
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.report.files import replace_file

__all__ = ["PolicyEdit", "apply_edits", "possible_edits", "update"]


@dataclass(frozen=True)
class PolicyEdit:
    """One change of the policy file; offsets are of characters in the file's text."""

    text: str
    start: int
    end: int
    new: str
    line: int
    removes: bool = False


def possible_edits(outcome: GateOutcome, text: str) -> list[PolicyEdit]:
    """What could be stricter in the policy with this text.

    Allowed failures that nothing needs any more or that cover fewer cells, counts that are lower than their limits,
    more cells that ran. Raises :class:`~pytest_torchcompile.errors.UsageError` for an entry that can't be taken out.
    """
    policy, ran = outcome.policy, sum(cell.ran for cell in outcome.cells.values())
    numbers = list(slack_numbers(policy, outcome.cells, outcome.allowed.used))
    if policy.ran_at_least is not None and ran > policy.ran_at_least:
        numbers.append(Slack("ran_at_least", policy.ran_at_least, ran, policy.places["ran_at_least"]))
    edits = list(_removed_entries(outcome, text))
    for slack in numbers:
        edits.append(PolicyEdit(slack.text, slack.node.start_mark.index, slack.node.end_mark.index, str(slack.new),
                                policy.line(slack.node)))
    return edits


def update(outcome: GateOutcome, path: Path) -> list[str]:
    """Write the stricter policy to its file, and return what was taken over.

    Raises :class:`~pytest_torchcompile.errors.UsageError` where the file's form does not allow it, or where the run is
    not whole, so that it can't be told what is no longer needed.
    """
    # A cell that is missing could be the one that still needs an entry.
    if any(finding.weight in ("unusable", "nothing") for finding in outcome.findings):
        raise UsageError(f"{path}: not updated: the run is not whole, so it can't be told what is no longer needed")
    # The marks of YAML count characters, without a byte order mark.
    text = path.read_bytes().decode("utf-8-sig")
    edits = possible_edits(outcome, text)
    if edits:
        text = apply_edits(text, edits)
        _check_edited(text, outcome.policy, edits, path)
        replace_file(path, text)
    return [f"{outcome.policy.path}:{edit.line}: {edit.text}" for edit in edits]


def apply_edits(text: str, edits: list[PolicyEdit]) -> str:
    """The text with the edits made, from the end so that the offsets hold."""
    for edit in sorted(edits, key=lambda each: -each.start):
        text = text[:edit.start] + edit.new + text[edit.end:]
    return text


def _removed_entries(outcome: GateOutcome, text: str) -> Iterator[PolicyEdit]:
    """Allowed failures that nothing needs any more."""
    policy = outcome.policy
    section = policy.places.get("allowed_failures")
    if not isinstance(section, yaml.SequenceNode):
        return
    unneeded = outcome.allowed.unneeded
    none_left = len(unneeded) == len(section.value)
    for number in unneeded:
        entry, node = policy.allowed_failures[number], section.value[number]
        if section.flow_style:
            raise UsageError(f"{policy.path}:{policy.line(node)}: the allowed failure is no longer needed, but the "
                             "list is written in brackets: take the entry out by hand")
        start, end = _offsets_of_entry(node, text)
        new = ""
        # A key with nothing behind it would be another mistake, so the first entry leaves an empty list.
        if none_left and number == unneeded[0]:
            new = f"{' ' * max(2, section.start_mark.column)}[]\n"
        yield PolicyEdit(f"allowed failure taken out: {entry}", start, end, new, policy.line(node), removes=True)


def _offsets_of_entry(node: yaml.Node, text: str) -> tuple[int, int]:
    """Offsets of the whole lines that an entry of a list takes, from its dash; comments behind it stay."""
    last = node
    # A block's own end is where the next begins, with the comments between; the end of its last scalar is exact.
    while isinstance(last, (yaml.MappingNode, yaml.SequenceNode)) and last.value and not last.flow_style:
        if isinstance(last, yaml.MappingNode):
            _, last = last.value[-1]
        else:
            last = last.value[-1]
    start = text.rfind("\n", 0, text.rindex("-", 0, node.start_mark.index)) + 1
    end = last.end_mark.index
    # A block scalar ends behind its line; all else ends within it.
    if text[end - 1:end] != "\n":
        end = text.find("\n", end) + 1 or len(text)
    return start, end


def _check_edited(text: str, old: Policy, edits: list[PolicyEdit], path: Path) -> None:
    """A text edit that went wrong must not reach the file."""
    new = parse_policy(text.encode(), str(path))
    removed = sum(edit.removes for edit in edits)
    same = (len(new.allowed_failures) == len(old.allowed_failures) - removed
            and _selectors_of_limits(new) == _selectors_of_limits(old)
            and len(new.allowed_skips) == len(old.allowed_skips) and new.places.keys() == old.places.keys())
    if not same:
        raise UsageError(f"{path}: not updated: its form is too unusual to edit; take over by hand: "
                         + "; ".join(edit.text for edit in edits))


def _selectors_of_limits(policy: Policy) -> list[str]:
    return [str(rule.when) for rule in policy.limits]
