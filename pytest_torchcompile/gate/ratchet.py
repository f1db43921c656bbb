"""The ratchet: a policy file is made as strict as what was measured, never less strict. Comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gate.gate import Outcome
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.gate.slack import Slack, counts
from pytest_torchcompile.report.files import replace_file

__all__ = ["Step", "steps", "tightened", "update"]


@dataclass(frozen=True)
class Step:
    """One change of the policy file; offsets are of characters in the file's text."""

    text: str
    start: int
    end: int
    new: str
    line: int
    removes: bool = False


def steps(outcome: Outcome, text: str) -> list[Step]:
    """What could be stricter in the policy with this text.

    Allowed failures that nothing needs any more or that cover fewer cells, counts that are lower than their limits,
    more cells that ran. Raises :class:`~pytest_torchcompile.errors.UsageError` for an entry that can't be taken out.
    """
    policy, ran = outcome.policy, sum(cell.ran for cell in outcome.cells.values())
    numbers = list(counts(policy, outcome.cells, outcome.allowed.used))
    if policy.ran_at_least is not None and ran > policy.ran_at_least:
        numbers.append(Slack("ran_at_least", policy.ran_at_least, ran, policy.places["ran_at_least"]))
    return [*_unneeded(outcome, text),
            *(Step(slack.text, slack.node.start_mark.index, slack.node.end_mark.index, str(slack.new),
                   policy.line(slack.node)) for slack in numbers)]


def update(outcome: Outcome, path: Path) -> list[str]:
    """Write the stricter policy to its file, and return what was taken over.

    Raises :class:`~pytest_torchcompile.errors.UsageError` where the file's form does not allow it, or where the run is
    not whole, so that it can't be told what is no longer needed.
    """
    if any(finding.weight in ("unusable", "nothing") for finding in outcome.findings):
        raise UsageError(f"{path}: not updated: the run is not whole, so it can't be told what is no longer needed")
    text = path.read_bytes().decode("utf-8-sig")
    taken = steps(outcome, text)
    if taken:
        text = tightened(text, taken)
        _check(text, outcome.policy, taken, path)
        replace_file(path, text)
    return [f"{outcome.policy.path}:{step.line}: {step.text}" for step in taken]


def tightened(text: str, taken: list[Step]) -> str:
    """The text with the steps taken, from the end so that the offsets hold."""
    for step in sorted(taken, key=lambda each: -each.start):
        text = text[:step.start] + step.new + text[step.end:]
    return text


def _unneeded(outcome: Outcome, text: str) -> Iterator[Step]:
    policy = outcome.policy
    section = policy.places.get("allowed_failures")
    if not isinstance(section, yaml.SequenceNode):
        return
    unneeded = outcome.allowed.unneeded
    for k in unneeded:
        entry, node = policy.allowed_failures[k], section.value[k]
        if section.flow_style:
            raise UsageError(f"{policy.path}:{policy.line(node)}: the allowed failure is no longer needed, but the "
                             "list is written in brackets: take the entry out by hand")
        start, end = _lines(node, text)
        none_left = len(unneeded) == len(section.value) and k == unneeded[0]
        keep = f"{' ' * max(2, section.start_mark.column)}[]\n" if none_left else ""
        yield Step(f"allowed failure taken out: {entry}", start, end, keep, policy.line(node), removes=True)


def _lines(node: yaml.Node, text: str) -> tuple[int, int]:
    """Offsets of the whole lines that an entry of a list takes, from its dash; comments behind it stay."""
    last = node
    while isinstance(last, (yaml.MappingNode, yaml.SequenceNode)) and last.value and not last.flow_style:
        last = last.value[-1][1] if isinstance(last, yaml.MappingNode) else last.value[-1]
    start = text.rfind("\n", 0, text.rindex("-", 0, node.start_mark.index)) + 1
    end = last.end_mark.index
    if text[end - 1:end] != "\n":  # a block scalar ends behind its line
        end = text.find("\n", end) + 1 or len(text)
    return start, end


def _check(text: str, old: Policy, taken: list[Step], path: Path) -> None:
    """A text edit that went wrong must not reach the file."""
    new = parse_policy(text.encode(), str(path))
    removed = sum(step.removes for step in taken)
    same = (len(new.allowed_failures) == len(old.allowed_failures) - removed
            and [str(rule.when) for rule in new.limits] == [str(rule.when) for rule in old.limits]
            and len(new.allowed_skips) == len(old.allowed_skips) and new.places.keys() == old.places.keys())
    if not same:
        raise UsageError(f"{path}: not updated: its form is too unusual to edit; take over by hand: "
                         + "; ".join(step.text for step in taken))
