"""Rules: what a matrix says of some of its cells: exclude, skip, xfail, limits."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS, LIMITS, RENAMED, renamed_text
from pytest_torchcompile.errors import nearest
from pytest_torchcompile.plan.axes import Axes, value_key, value_keys
from pytest_torchcompile.plan.nodes import describe_node
from pytest_torchcompile.plan.reader import Missing, Reader

__all__ = ["NOT", "OUTCOMES", "RULE_KEYS", "VERBS", "Rule", "read_checks", "read_rules"]

OUTCOMES: Final = ("exclude", "skip", "xfail")
VERBS: Final[dict[str, tuple[str, ...]]] = {
    "exclude": ("reason", "issue", "torch"),
    "skip": ("reason", "issue", "torch"),
    "xfail": ("reason", "issue", "until", "checks", "torch"),
    "limits": ("when", "reason", "torch"),
    "also": ("when", "reason", "torch"),
}
"""Verb to the keys that a rule with this verb may have besides it."""
NOT: Final = "not"
"""The key of a condition whose own condition must not hold."""
Select: TypeAlias = "dict[str, tuple[Scalar, ...]]"
RULE_KEYS: Final = {
    "exclude": "the cells that make no sense: axis to value, or to a list of values; `not` to such a mapping",
    "skip": "the cells that cannot run",
    "xfail": "the cells that are known to fail; one that passes fails the run, so that stale rules leave",
    "limits": "limit to number, for the cells of `when`",
    "also": "checks that only the cells of `when` have, besides those of the key `checks`",
    "when": "the cells that the limits or checks are for; of limits all of them if left out",
    "reason": "why, for the report",
    "issue": "where it is tracked, for example owner/repo#123",
    "until": "the last day on which the xfail holds, YYYY-MM-DD",
    "checks": "the checks that are known to fail; left out: any, but no wrong numbers",
    "torch": "the versions of torch that the rule is for, like \">=2.12, <2.14\"; with any other it is not there",
}


@dataclass(frozen=True)
class Rule:
    """One rule. A cell matches if each axis of ``select`` has one of the values there, unless ``unless`` holds."""

    verb: str
    select: dict[str, tuple[Scalar, ...]]
    where: str
    """``file:line``"""
    reason: str = ""
    issue: str = ""
    until: datetime.date | None = None
    checks: tuple[str, ...] = ()
    """Of an xfail those that are known to fail, of ``also`` those that it adds."""
    limits: dict[str, float] = field(default_factory=dict)
    unless: dict[str, tuple[Scalar, ...]] = field(default_factory=dict)
    """What stands under ``not``: a cell that has one of the values for each of these axes does not match."""

    torch: str = ""
    """The versions of torch that the rule is for, as pip writes them; empty: all."""

    def is_for(self, torch: str | None) -> bool:
        """Is the rule for this version of torch? For an unknown one (None) it is."""
        # Nightlies and release candidates count as well.
        return not self.torch or torch is None or SpecifierSet(self.torch).contains(torch, prereleases=True)

    def is_expired(self, today: datetime.date) -> bool:
        """Is ``until`` over?"""
        return self.until is not None and today > self.until


REQUIRED: Final = {verb: (verb, "reason") for verb in OUTCOMES} | {"limits": ("limits",), "also": ("also", "when")}
"""Verb to the keys that a rule with this verb must have."""


def read_checks(reader: Reader, node: yaml.Node | None, what: str = "a check",
                known: Sequence[str] = tuple(CHECKS)) -> tuple[str, ...]:
    """Read a list of checks, each once; if there is no list, all known ones that need not be asked for.

    However they are listed, causes are judged before what follows from them: in the order of ``known``.
    """
    if node is None:
        return tuple(name for name in known if not CHECKS[name].on_request)
    found: list[str] = []
    for item in reader.items(node, "checks", alone=True):
        name = _check_named(reader, item, what, known)
        if name in found:
            reader.wrong(item, f"checks: {name!r} is listed twice")
        elif name is not None:
            found.append(name)
    return tuple(sorted(found, key=known.index))


def _check_named(reader: Reader, node: yaml.Node, what: str, known: Sequence[str]) -> str | None:
    """The check that the node names, be it by an old name."""
    given = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
    if RENAMED.get(given) in known:
        reader.note(node, renamed_text(given))
        return RENAMED[given]
    return reader.name(node, what, known)


def read_rules(reader: Reader, node: yaml.Node | None, axes: Axes | None,
               checks: tuple[str, ...]) -> list[tuple[Rule, yaml.Node]]:
    """Read the section ``rules``, each rule with its node; those with mistakes are left out.

    ``axes`` None: the axes have mistakes themselves, so values are not looked up in them.
    """
    if node is None or (isinstance(node, yaml.SequenceNode) and not node.value):
        return []
    rule_reader = _RuleReader(reader, axes, checks, _checks_added_by(node))
    rules = []
    for item in reader.items(node, "rules"):
        rule = rule_reader.read_rule(item)
        if rule is not None:
            rules.append((rule, item))
    return rules


def _checks_added_by(node: yaml.Node) -> tuple[str, ...]:
    """The checks that some rule asks of some cells: limits and xfails of any rule may name them.

    Read ahead of the rules, whatever mistakes they have: those are noted when each rule is read.
    """
    names: dict[str, None] = {}
    rules = [rule for rule in _entries_of(node) if isinstance(rule, yaml.MappingNode)]
    for rule in rules:
        for key, value in rule.value:
            if key.value == "also":
                added = _entries_of(value) or [value]
                names |= {name.value: None for name in added if isinstance(name, yaml.ScalarNode)}
    # Names that are unknown are left to the reader of each rule, which has their place.
    return tuple(current for name in names if (current := RENAMED.get(name, name)) in CHECKS)


def _entries_of(node: yaml.Node) -> list[yaml.Node]:
    """The entries of a list; none for what is no list."""
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []


@dataclass
class _RuleReader:
    """Reads one rule after the other."""

    reader: Reader
    axes: Axes | None
    checks: tuple[str, ...]
    """The key ``checks``."""
    also: tuple[str, ...]
    """What some rule asks of some cells."""

    def read_rule(self, node: yaml.Node) -> Rule | None:
        """Read one rule; None if it has a mistake."""
        before = len(self.reader.mistakes)
        verb = self._read_verb(node)
        if verb is None:
            return None
        keys = self.reader.fields(node, f"this {verb} rule", (verb, *VERBS[verb]), REQUIRED[verb])
        values: dict[str, Any] = {"select": {}, "unless": {}}
        for name in ("reason", "issue"):
            if name in keys:
                values[name] = self.reader.text(keys[name], name) or ""
        if "torch" in keys:
            values["torch"] = self._read_versions(keys["torch"])
        if "until" in keys:
            values["until"] = self.reader.date(keys["until"], "until")
        if "checks" in keys:
            what = "a check of this matrix"
            values["checks"] = read_checks(self.reader, keys["checks"], what, (*self.checks, *self.also))
        if verb == "also" and verb in keys:
            values["checks"] = self._read_added_checks(keys[verb])
        # An exclude, skip or xfail has its condition under the verb itself.
        selector = keys.get(verb if verb in OUTCOMES else "when")
        if selector is not None:
            values["select"], values["unless"] = self._read_condition(selector, verb)
        if verb == "limits" and verb in keys:
            values["limits"] = self._read_limits(keys[verb])
        if len(self.reader.mistakes) > before:
            return None
        return Rule(verb, where=self.reader.where(node), **values)

    def _read_versions(self, node: yaml.Node) -> str:
        text = self.reader.text(node, "torch") or ""
        try:
            # Read here although it is asked later: a mistake has its place in the file only now.
            SpecifierSet(text)
        except InvalidSpecifier:
            self.reader.wrong(node, f"torch: {text!r} names no versions; expected them as pip has them, "
                                    "like \">=2.12, <2.14\"")
        return text

    def _read_verb(self, node: yaml.Node) -> str | None:
        keys = [name for name, _, _ in self.reader.entries(node, "a rule")]
        verbs = [name for name in keys if name in VERBS]
        if len(verbs) == 1:
            return verbs[0]
        if verbs:
            self.reader.wrong(node, f"this rule has the verbs {' and '.join(verbs)}; expected one in a rule")
        elif keys:
            # The verb is most likely among the keys that are unknown, misspelt.
            unknown = [name for name in keys if name not in RULE_KEYS]
            likely = (unknown or keys)[0]
            listed = ", ".join(map(repr, keys))
            self.reader.wrong(node, f"this rule has no verb, only {listed}; {nearest(likely, VERBS)}")
        elif isinstance(node, yaml.MappingNode):
            self.reader.wrong(node, f"this rule is empty; expected one of {', '.join(VERBS)}")
        return None

    def _read_condition(self, node: yaml.Node, verb: str) -> tuple[Select, Select]:
        """Which values a cell must have, and which it must not have together."""
        entries = self.reader.entries(node, verb)
        if not entries and isinstance(node, yaml.MappingNode):
            self.reader.wrong(node, f"{verb}: no axis is named, so every cell matches; expected at least one")
        axes = []
        unless: Select = {}
        for entry in entries:
            name, _, value = entry
            if name != NOT:
                axes.append(entry)
                continue
            inner = self.reader.entries(value, NOT)
            if not inner and isinstance(value, yaml.MappingNode):
                self.reader.wrong(value, f"{NOT}: no axis is named, so no cell matches; expected at least one")
            unless = self._read_select(inner)
        return self._read_select(axes, NOT), unless

    def _read_select(self, entries: list[tuple[str, yaml.Node, yaml.Node]], *words: str) -> Select:
        """Read axes and their values; ``words`` are what else might stand in place of an axis."""
        select: Select = {}
        for axis, key, value in entries:
            if self.axes is None:
                continue
            if axis not in self.axes:
                self.reader.wrong(key, f"unknown axis {axis!r}; {nearest(axis, [*self.axes, *words])}")
                continue
            select[axis] = self._read_values(axis, value, self.axes[axis])
        return select

    def _read_values(self, axis: str, node: yaml.Node, known: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        keys = value_keys(known)
        values: list[Scalar] = []
        for item in self.reader.items(node, f"axis {axis!r}", alone=True):
            value = self.reader.scalar(item, f"axis {axis!r}")
            if isinstance(value, Missing):
                continue
            if value_key(value) not in keys:
                what = "model" if axis == "model" else f"value of axis {axis!r}"
                # 2 and '2' are different values, and read alike in a message.
                alike = [other for other in known if str(other) == str(value)]
                if alike:
                    hint = f"it has {alike[0]!r}"
                else:
                    hint = nearest(str(value), map(str, known))
                self.reader.wrong(item, f"{value!r} is not a {what} in this matrix; {hint}")
            elif value in values:
                self.reader.wrong(item, f"axis {axis!r}: {describe_node(item)} is listed twice")
            else:
                values.append(value)
        return tuple(values)

    def _read_added_checks(self, node: yaml.Node) -> tuple[str, ...]:
        """Checks that not every cell has already."""
        names = read_checks(self.reader, node)
        for name in names:
            if name in self.checks:
                self.reader.wrong(node, f"also: every cell has {name!r} already; take it out here, or out of `checks`")
        return names

    def _read_limits(self, node: yaml.Node) -> dict[str, float]:
        limits = {}
        for name, key, value in self.reader.entries(node, "limits"):
            if name not in LIMITS:
                self.reader.wrong(key, f"unknown limit {name!r}; {nearest(name, LIMITS)}")
                continue
            # A limit that no check of this matrix asks for would be believed to hold.
            owners = [check for check, entry in CHECKS.items() if LIMITS[name] in entry.limits]
            if not any(owner in (*self.checks, *self.also) for owner in owners):
                self.reader.wrong(key, f"limit {name!r} has no effect: checks leaves out {owners[0]!r}")
            limit = LIMITS[name]
            number = self.reader.number(value, f"limit {name!r}", whole=limit.whole, least=limit.least,
                                        most=limit.most)
            if number is not None:
                limits[name] = number
        if not limits and isinstance(node, yaml.MappingNode) and not node.value:
            self.reader.wrong(node, f"limits: none is given; expected at least one of {', '.join(LIMITS)}")
        return limits
