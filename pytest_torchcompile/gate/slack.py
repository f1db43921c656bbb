"""Slack: where a policy allows more than the run needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import yaml

from pytest_torchcompile.gate.allowances import untold
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import LimitRule, Policy
from pytest_torchcompile.gate.policy_limits import worst
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.metrics import METRICS

__all__ = ["Slack", "counts", "findings"]


@dataclass(frozen=True)
class Slack:
    """A number of the policy that could be stricter."""

    name: str
    old: float
    new: int
    node: yaml.Node
    """Where the number stands."""

    @property
    def text(self) -> str:
        """``recompiles: 3 -> 1``."""
        return f"{self.name}: {self.old:g} -> {self.new}"


def counts(policy: Policy, cells: Mapping[str, JudgedCell], used: Counter[int]) -> Iterator[Slack]:
    """Limits on counts that are higher than the largest count of their cells, and ``at_most`` of allowed failures.

    ``used``: number of an allowed failure to the cells that need it.
    """
    for rule in policy.limits:
        for name, limit in rule.limits.items():
            if name in METRICS and METRICS[name].whole and METRICS[name].kind == "max":
                largest = _largest(policy, rule, name, cells)
                if largest is not None and largest < limit:
                    yield Slack(name, limit, largest, rule.nodes[name])
    for number, entry in enumerate(policy.allowed_failures):
        if (entry.at_most is not None and entry.at_most_node is not None and 0 < used[number] < entry.at_most
                and not untold(entry, cells.values())):
            yield Slack("at_most", entry.at_most, used[number], entry.at_most_node)


def _largest(policy: Policy, rule: LimitRule, name: str, cells: Mapping[str, JudgedCell]) -> int | None:
    """Of the cells in which this rule has the last word; None where one of them has not run compiled code."""
    own = [cell for cell in cells.values()
           if name in (limits := policy.limits_of(cell.axes)) and limits[name][1] is rule]
    if not all(cell.compiled for cell in own):
        return None
    numbers = (worst(cell.ranks, name) for cell in own)
    return max((int(number) for number in numbers if number is not None), default=None)


def findings(policy: Policy, cells: Mapping[str, JudgedCell], used: Counter[int]) -> Iterator[Finding]:
    """A finding for each: a failure where the policy has ``ratchet: true``, else a note."""
    for slack in counts(policy, cells, used):
        line = policy.line(slack.node)
        yield Finding("improved", "fail" if policy.ratchet else "note", f"improved: {policy.path}:{line}: {slack.text}",
                      file=policy.path, line=line, hint="take it over by --update-policy")
