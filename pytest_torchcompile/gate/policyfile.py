"""A policy file read: YAML to a policy, with ``file:line:column`` for every mistake."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any, Final

import yaml

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.errors import nearest
from pytest_torchcompile.gate.policy import (
    BASELINE,
    COMMIT,
    HEAD,
    RATIOS,
    AllowedFailure,
    AllowedSkip,
    LimitRule,
    PassRate,
    Policy,
    Selector,
)
from pytest_torchcompile.plan.nodes import compose, describe_node, read_bytes
from pytest_torchcompile.plan.reader import Missing, Reader
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.record import GATES

__all__ = ["KEYS", "VERSION", "parse_policy", "read_policy"]

VERSION: Final = 1
KEYS: Final = {
    "version": f"version of this format: {VERSION}",
    "matrix": "the matrix file that the reports must be of, from the policy's folder, or shipped:NAME",
    "gates": "gates that must pass, whether the matrix runs them or not",
    "environment": "key of the report's environment to the pattern that it must match",
    "may_differ": "keys of the environment that may differ between shards, besides cores, cpu and platform",
    "devices": "patterns of devices, each of which must have run compiled code",
    "ran_at_least": "number of cells that must have run compiled code",
    "tests": "of the tests that use our fixtures: `ran_at_least`, the number that must have run compiled code",
    "pass_rate": "share of the cells that must be good, for `total` or each value of an axis; lets the others fail",
    "limits": "limits for the cells of `when`; those of the matrix are judged again with them",
    "allowed_failures": "failures of `cells` or `tests` that are known, with reason, issue and last day",
    "allowed_skips": "`cells` or `tests` that may be skipped, with reason",
    "baseline": "kind of change against --baseline to `fail` (the default) or `note`",
    "commit": "the commit that the reports must be of: a SHA, or HEAD of the policy's folder",
    "max_age": "how long ago the run may have ended, in minutes, hours or days: 90m, 24h, 7d",
    "sealed": "required: every report must be as its run wrote it, to the last byte",
    "other_tests": "fail: other tests of that pytest run must not fail either; note (the default): it is told",
    "ratchet": "true: a limit on a count that is higher than what was measured fails, until it is taken over",
}
_FAILURE_KEYS: Final = ("cells", "tests", "checks", "verdicts", "contains", "at_most", "reason", "issue", "until")
_AGE: Final = re.compile("([1-9][0-9]{0,4})([mhd])")
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}
_VERDICTS: Final = ("fail", "crash", "timeout", "error")
_LIMITS: Final = tuple(dict.fromkeys((*LIMITS, *METRICS, *RATIOS)))


def read_policy(path: str | Path) -> Policy:
    """Read a policy file.

    Raises :class:`~pytest_torchcompile.errors.MatrixError` with a line for each mistake, in the file's order.
    """
    return parse_policy(read_bytes(Path(path), str(path), "policy"), str(path))


def parse_policy(data: bytes, shown: str) -> Policy:
    """Read the bytes of a policy file; ``shown`` is its name in error texts."""
    reader = Reader(shown)
    policy = _Reading(reader).policy(compose(data, shown, "the key version"))
    reader.finish()
    return policy


class _Reading:
    """The sections; one that has a mistake is left out, and the mistake is noted."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def policy(self, node: yaml.Node) -> Policy:
        reader = self.reader
        found = reader.fields(node, "the policy", KEYS, ("version",))
        if (version := found.pop("version", None)) is not None and \
                (not isinstance(version, yaml.ScalarNode) or version.value != str(VERSION) or version.style):
            reader.wrong(version, f"version: found {describe_node(version)}, expected {VERSION}, "
                                  "the only one that is read here")
        values: dict[str, Any] = {}
        for name, section in found.items():
            if name in ("limits", "allowed_failures", "allowed_skips"):
                read_one = {"limits": self._limit_rule, "allowed_failures": self._failure,
                            "allowed_skips": self._skip}[name]
                entries = (read_one(item) for item in self._entries(section, name))
                values[name] = tuple(entry for entry in entries if entry is not None)
            elif name == "matrix":
                values[name] = reader.text(section, name) or ""
            elif name == "ran_at_least":
                values[name] = reader.integer(section, name, least=1)
            elif name == "tests":
                values["tests_ran_at_least"] = self._tests(section)
            elif name == "gates":
                values[name] = self._names(section, name, GATES, "a gate")
            elif name in ("devices", "may_differ"):
                texts = filter(None, (reader.text(item, name) for item in reader.items(section, name)))
                values[name] = tuple(texts) if name == "devices" else frozenset(texts)
            elif name == "ratchet":
                values[name] = self._truth(section, name)
            elif name == "commit":
                values[name] = self._commit(section)
            elif name == "max_age":
                values[name] = self._age(section)
            elif name == "other_tests":
                what = "what other tests that fail may do"
                values[name] = reader.name(section, what, ("fail", "note")) == "fail"
            elif name == "sealed":
                values[name] = reader.name(section, "what seals may be", ("required",)) is not None
        values["environment"] = self._texts(found.get("environment"), "environment")
        values["baseline"] = self._baseline(found.get("baseline"))
        values["pass_rates"] = tuple(self._pass_rates(found["pass_rate"])) if "pass_rate" in found else ()
        return Policy(reader.path, places=found, **values)

    def _entries(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        """The entries of a list that may be empty: the last one of a list goes, and its key may stay."""
        if describe_node(node) == "nothing" or (isinstance(node, yaml.SequenceNode) and not node.value):
            return []
        return self.reader.items(node, what)

    def _limit_rule(self, node: yaml.Node) -> LimitRule | None:
        before = len(self.reader.mistakes)
        entries = self.reader.entries(node, "an entry of limits")
        when = Selector({}, node)
        limits: dict[str, float] = {}
        nodes: dict[str, yaml.Node] = {}
        for name, key, value in entries:
            if name == "when":
                when = self._selector(value, "when")
            elif name == "reason":
                self.reader.text(value, name)
            elif name not in _LIMITS:
                self.reader.wrong(key, f"unknown limit {name!r}; {nearest(name, (*_LIMITS, 'when', 'reason'))}")
            elif (number := self._limit(name, value)) is not None:
                limits[name], nodes[name] = number, value
        if len(self.reader.mistakes) > before:
            return None
        if not limits:
            self.reader.wrong(node, f"this entry has no limit; expected at least one of {', '.join(_LIMITS)}")
            return None
        return LimitRule(when, limits, nodes)

    def _limit(self, name: str, node: yaml.Node) -> float | None:
        if (limit := LIMITS.get(name)) is not None:
            return self.reader.number(node, name, whole=limit.whole, least=limit.least, most=limit.most)
        return self.reader.number(node, name, whole=name in METRICS and METRICS[name].whole)

    def _failure(self, node: yaml.Node) -> AllowedFailure | None:
        before = len(self.reader.mistakes)
        found = self.reader.fields(node, "an allowed failure", _FAILURE_KEYS, ("reason", "issue", "until"))
        values: dict[str, Any] = {name: self.reader.text(found[name], name)
                                  for name in ("reason", "issue", "contains") if name in found}
        if (selector := self._cells_or_tests(node, found)) is not None:
            values["cells"] = selector
        if "until" in found:
            values["until"] = self.reader.date(found["until"], "until")
        if "checks" in found:
            values["checks"] = self._names(found["checks"], "checks", (*CHECKS, *_LIMITS), "a check or a limit")
        if "verdicts" in found:
            values["verdicts"] = self._names(found["verdicts"], "verdicts", _VERDICTS, "a verdict that can be allowed")
        if "at_most" in found:
            values["at_most"] = self.reader.integer(found["at_most"], "at_most", least=1)
            values["at_most_node"] = found["at_most"]
        return AllowedFailure(**values) if len(self.reader.mistakes) == before and values else None

    def _skip(self, node: yaml.Node) -> AllowedSkip | None:
        before = len(self.reader.mistakes)
        found = self.reader.fields(node, "an allowed skip", ("cells", "tests", "contains", "reason"), ("reason",))
        values: dict[str, Any] = {name: self.reader.text(found[name], name)
                                  for name in ("reason", "contains") if name in found}
        if (selector := self._cells_or_tests(node, found)) is not None:
            values["cells"] = selector
        return AllowedSkip(**values) if len(self.reader.mistakes) == before and values else None

    def _tests(self, node: yaml.Node) -> int | None:
        found = self.reader.fields(node, "tests", ("ran_at_least",), ("ran_at_least",))
        return self.reader.integer(found["ran_at_least"], "ran_at_least", least=1) if "ran_at_least" in found else None

    def _cells_or_tests(self, node: yaml.Node, found: dict[str, yaml.Node]) -> Selector | None:
        """What an entry is for: cells by their axes, or tests by their node ids."""
        if ("cells" in found) == ("tests" in found):
            have = "both `cells` and `tests`" if "cells" in found else "neither `cells` nor `tests`"
            self.reader.wrong(node, f"this entry has {have}; expected one of them")
            return None
        if "cells" in found:
            return self._selector(found["cells"], "cells")
        items = self.reader.items(found["tests"], "tests", alone=True)
        patterns = tuple(filter(None, (self.reader.text(item, "tests") for item in items)))
        return Selector({}, found["tests"], tests=patterns)

    def _selector(self, node: yaml.Node, what: str) -> Selector:
        values: dict[str, tuple[Scalar, ...]] = {}
        axes: dict[str, yaml.Node] = {}
        entries = self.reader.entries(node, what)
        if not entries and isinstance(node, yaml.MappingNode):
            self.reader.wrong(node, f"{what}: no axis is named, so every cell matches; expected at least one")
        for axis, key, value in entries:
            items = [self.reader.scalar(item, f"axis {axis!r}")
                     for item in self.reader.items(value, f"axis {axis!r}", alone=True)]
            values[axis], axes[axis] = tuple(item for item in items if not isinstance(item, Missing)), key
        return Selector(values, node, axes)

    def _pass_rates(self, node: yaml.Node) -> list[PassRate]:
        found: list[PassRate] = []
        for name, key, value in self.reader.entries(node, "pass_rate"):
            if not isinstance(value, yaml.MappingNode):
                self._rate(found, value, name, key)
                continue
            for text, one, rate in self._values(value, name):
                only = Selector({name: (text,)}, one, {name: one})
                self._rate(found, rate, name, one, only)
        return found

    def _values(self, node: yaml.MappingNode, axis: str) -> list[tuple[Scalar, yaml.Node, yaml.Node]]:
        read_all = [(self.reader.scalar(key, f"axis {axis!r}"), key, value) for key, value in node.value]
        return [(value, key, rate) for value, key, rate in read_all if not isinstance(value, Missing)]

    def _rate(self, found: list[PassRate], node: yaml.Node, axis: str, place: yaml.Node,
              only: Selector | None = None) -> None:
        rate = self.reader.number(node, f"pass_rate of {axis!r}", whole=False, most=1)
        if rate is not None:
            found.append(PassRate(rate, place, "" if axis == "total" else axis, only))

    def _texts(self, node: yaml.Node | None, what: str) -> dict[str, str]:
        if node is None:
            return {}
        entries = ((name, self.reader.text(value, name)) for name, _, value in self.reader.entries(node, what))
        return {name: text for name, text in entries if text is not None}

    def _baseline(self, node: yaml.Node | None) -> dict[str, str]:
        if node is None:
            return {}
        found = self.reader.fields(node, "baseline", BASELINE)
        entries = ((name, self.reader.name(value, "what a change may do", ("fail", "note")))
                   for name, value in found.items())
        return {name: text for name, text in entries if text is not None}

    def _names(self, node: yaml.Node, what: str, known: tuple[str, ...], kind_of_name: str) -> tuple[str, ...]:
        items = self.reader.items(node, what, alone=True)
        return tuple(filter(None, (self.reader.name(item, kind_of_name, known) for item in items)))

    def _commit(self, node: yaml.Node) -> str:
        text = self.reader.text(node, "commit") or ""
        if text and text != HEAD and not COMMIT.fullmatch(text):
            self.reader.wrong(node, f"commit: found {text!r}, expected HEAD, or a commit's SHA of 7 letters (0-9, a-f) "
                                    "or more")
        return text

    def _age(self, node: yaml.Node) -> datetime.timedelta | None:
        text = self.reader.text(node, "max_age") or ""
        found = _AGE.fullmatch(text)
        if text and found is None:
            self.reader.wrong(node, f"max_age: found {text!r}, expected minutes, hours or days, for example 90m, 24h "
                                    "or 7d")
        return None if found is None else datetime.timedelta(**{_UNITS[found[2]]: int(found[1])})

    def _truth(self, node: yaml.Node, what: str) -> bool:
        value = self.reader.scalar(node, what)
        if not isinstance(value, (bool, Missing)):
            self.reader.wrong(node, f"{what}: found {describe_node(node)}, expected true or false")
        return value is True
