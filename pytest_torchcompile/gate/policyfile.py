"""A policy file read: YAML to a policy, with ``file:line:column`` for every mistake."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS, LIMITS, RENAMED, current_name
from pytest_torchcompile.checks.severity import NUMBERS_OF_TESTS
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
    ReuseRule,
    Selector,
)
from pytest_torchcompile.plan.nodes import compose, describe_node, read_bytes
from pytest_torchcompile.plan.reader import Missing, Reader
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.record import GATES

__all__ = ["AGE", "KEYS", "LIMIT_NAMES", "VERDICTS", "VERSION", "parse_policy", "read_policy"]

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
    "reuse": "forbidden, or of cells that were not run as nothing of them changed: `max_age` and `at_most`, a share",
    "sealed": "required: every report must be as its run wrote it, to the last byte",
    "other_tests": "fail: other tests of that pytest run must not fail either; note (the default): it is told",
    "ratchet": "true: a limit on a count that is higher than what was measured fails, until it is taken over",
}
_FAILURE_KEYS: Final = ("cells", "tests", "checks", "verdicts", "contains", "at_most", "reason", "issue", "until")
AGE: Final = re.compile("([1-9][0-9]{0,4})([mhd])")
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}
VERDICTS: Final = ("fail", "crash", "timeout", "error")
LIMIT_NAMES: Final = tuple(dict.fromkeys((*LIMITS, *METRICS, *RATIOS)))


def read_policy(path: str | Path) -> Policy:
    """Read a policy file.

    Raises :class:`~pytest_torchcompile.errors.MatrixError` with a line for each mistake, in the file's order.
    """
    return parse_policy(read_bytes(Path(path), str(path), "policy"), str(path))


def parse_policy(data: bytes, shown: str) -> Policy:
    """Read the bytes of a policy file; ``shown`` is its name in error texts."""
    reader = Reader(shown)
    policy = _PolicyReader(reader).read_policy(compose(data, shown, "the key version"))
    reader.finish()
    return policy


class _PolicyReader:
    """The sections; one that has a mistake is left out, and the mistake is noted."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def read_policy(self, node: yaml.Node) -> Policy:
        """The whole file. A key's value goes into the field of its name, but for the two named here."""
        sections = self.reader.fields(node, "the policy", KEYS, ("version",))
        version = sections.pop("version", None)
        if version is not None:
            self._check_version(version)
        readers: dict[str, Callable[[yaml.Node, str], Any]] = {
            "matrix": self._text,
            "gates": self._gates,
            "environment": self._texts_by_name,
            "may_differ": self._set_of_texts,
            "devices": self._texts,
            "ran_at_least": self._count,
            "tests": self._tests_section,
            "pass_rate": self._pass_rates,
            "limits": self._limit_rules,
            "allowed_failures": self._allowed_failures,
            "allowed_skips": self._allowed_skips,
            "baseline": self._baseline_section,
            "commit": self._commit,
            "max_age": self._max_age,
            "reuse": self._reuse,
            "sealed": self._sealed,
            "other_tests": self._other_tests,
            "ratchet": self._truth,
        }
        # The other keys are fields of `Policy` by the same name.
        fields = {"tests": "tests_ran_at_least", "pass_rate": "pass_rates"}
        values: dict[str, Any] = {}
        for name, section in sections.items():
            values[fields.get(name, name)] = readers[name](section, name)
        return Policy(self.reader.path, places=sections, **values)

    def _check_version(self, node: yaml.Node) -> None:
        # A quoted "1" is a text, and no number.
        if not isinstance(node, yaml.ScalarNode) or node.value != str(VERSION) or node.style:
            self.reader.wrong(node, f"version: found {describe_node(node)}, expected {VERSION}, "
                                    "the only one that is read here")

    # sections that are one value

    def _text(self, node: yaml.Node, name: str) -> str:
        return self.reader.text(node, name) or ""

    def _count(self, node: yaml.Node, name: str) -> int | None:
        return self.reader.integer(node, name, least=1)

    def _truth(self, node: yaml.Node, name: str) -> bool:
        value = self.reader.scalar(node, name)
        if not isinstance(value, (bool, Missing)):
            self.reader.wrong(node, f"{name}: found {describe_node(node)}, expected true or false")
        return value is True

    def _sealed(self, node: yaml.Node, name: str) -> bool:
        return self.reader.name(node, "what seals may be", ("required",)) is not None

    def _other_tests(self, node: yaml.Node, name: str) -> bool:
        return self.reader.name(node, "what other tests that fail may do", ("fail", "note")) == "fail"

    def _commit(self, node: yaml.Node, name: str) -> str:
        text = self._text(node, name)
        if text and text != HEAD and not COMMIT.fullmatch(text):
            self.reader.wrong(node, f"commit: found {text!r}, expected HEAD, or a commit's SHA of 7 letters (0-9, a-f) "
                                    "or more")
        return text

    def _max_age(self, node: yaml.Node, name: str) -> datetime.timedelta | None:
        text = self._text(node, name)
        age = AGE.fullmatch(text)
        if age is not None:
            return datetime.timedelta(**{_UNITS[age[2]]: int(age[1])})
        if text:
            self.reader.wrong(node, f"max_age: found {text!r}, expected minutes, hours or days, for example 90m, 24h "
                                    "or 7d")
        return None

    def _reuse(self, node: yaml.Node, name: str) -> ReuseRule:
        if isinstance(node, yaml.ScalarNode):
            self.reader.name(node, "what reuse may be, besides a mapping of max_age and at_most,", ("forbidden",))
            return ReuseRule(forbidden=True)
        values: dict[str, Any] = {}
        for key, value in self.reader.fields(node, name, ("max_age", "at_most")).items():
            if key == "max_age":
                values[key] = self._max_age(value, key)
            else:
                values[key] = self.reader.number(value, key, whole=False, least=0, most=1) or 0.0
        return ReuseRule(**values)

    # sections of names and texts

    def _gates(self, node: yaml.Node, name: str) -> tuple[str, ...]:
        return self._names(node, name, GATES, "a gate")

    def _names(self, node: yaml.Node, what: str, known: tuple[str, ...], kind_of_name: str) -> tuple[str, ...]:
        items = self.reader.items(node, what, alone=True)
        return tuple(filter(None, [self.reader.name(item, kind_of_name, known) for item in items]))

    def _texts(self, node: yaml.Node, name: str, alone: bool = False) -> tuple[str, ...]:
        items = self.reader.items(node, name, alone=alone)
        return tuple(filter(None, [self.reader.text(item, name) for item in items]))

    def _set_of_texts(self, node: yaml.Node, name: str) -> frozenset[str]:
        return frozenset(self._texts(node, name))

    def _texts_by_name(self, node: yaml.Node, name: str) -> dict[str, str]:
        texts = {}
        for key, _, value in self.reader.entries(node, name):
            text = self.reader.text(value, key)
            if text is not None:
                texts[key] = text
        return texts

    def _tests_section(self, node: yaml.Node, name: str) -> int | None:
        fields = self.reader.fields(node, name, ("ran_at_least",), ("ran_at_least",))
        if "ran_at_least" not in fields:
            return None
        return self._count(fields["ran_at_least"], "ran_at_least")

    def _baseline_section(self, node: yaml.Node, name: str) -> dict[str, str]:
        weights = {}
        for change, value in self.reader.fields(node, name, BASELINE).items():
            weight = self.reader.name(value, "what a change may do", ("fail", "note"))
            if weight is not None:
                weights[change] = weight
        return weights

    # sections of entries

    def _entries(self, node: yaml.Node, name: str) -> list[yaml.Node]:
        """The entries of a list that may be empty: the last one of a list goes, and its key may stay."""
        if describe_node(node) == "nothing" or (isinstance(node, yaml.SequenceNode) and not node.value):
            return []
        return self.reader.items(node, name)

    def _limit_rules(self, node: yaml.Node, name: str) -> tuple[LimitRule, ...]:
        return tuple(filter(None, map(self._limit_rule, self._entries(node, name))))

    def _limit_rule(self, node: yaml.Node) -> LimitRule | None:
        before = len(self.reader.mistakes)
        entries = self.reader.entries(node, "an entry of limits")
        # Without `when` it is for every cell.
        when = Selector({}, node)
        limits: dict[str, float] = {}
        nodes: dict[str, yaml.Node] = {}
        for name, key, value in entries:
            if name == "when":
                when = self._selector(value, "when")
            elif name == "reason":
                self.reader.text(value, name)
            elif name == "limits":
                self.reader.wrong(key, "in a policy limits stand beside `when`, not in `limits:` as in a matrix: write "
                                       "`graph_breaks: 1`")
            elif name not in LIMIT_NAMES:
                self.reader.wrong(key, f"unknown limit {name!r}; {nearest(name, (*LIMIT_NAMES, 'when', 'reason'))}")
            else:
                # A limit of the matrix has bounds of its own; a metric is any number.
                number = self._limit(name, value)
                if number is not None:
                    limits[name], nodes[name] = number, value
        if len(self.reader.mistakes) > before:
            return None
        if not limits:
            self.reader.wrong(node, f"this entry has no limit; expected at least one of {', '.join(LIMIT_NAMES)}")
            return None
        return LimitRule(when, limits, nodes)

    def _limit(self, name: str, node: yaml.Node) -> float | None:
        limit = LIMITS.get(name)
        if limit is not None:
            return self.reader.number(node, name, whole=limit.whole, least=limit.least, most=limit.most)
        return self.reader.number(node, name, whole=name in METRICS and METRICS[name].whole)

    def _allowed_failures(self, node: yaml.Node, name: str) -> tuple[AllowedFailure, ...]:
        return tuple(filter(None, map(self._allowed_failure, self._entries(node, name))))

    def _allowed_failure(self, node: yaml.Node) -> AllowedFailure | None:
        before = len(self.reader.mistakes)
        fields = self.reader.fields(node, "an allowed failure", _FAILURE_KEYS, ("reason", "issue", "until"))
        values = self._texts_and_selector(node, fields, ("reason", "issue", "contains"))
        if "until" in fields:
            values["until"] = self.reader.date(fields["until"], "until")
        if "checks" in fields:
            known, kind = (*CHECKS, *RENAMED, *LIMIT_NAMES), "a check or a limit"
            if "tests" in fields:
                # A test has no checks; this one's name says that its wrong numbers are known.
                known, kind = (NUMBERS_OF_TESTS,), "a check that an entry of tests can name"
            named = self._names(fields["checks"], "checks", known, kind)
            values["checks"] = tuple(map(current_name, named))
        if "verdicts" in fields:
            values["verdicts"] = self._names(fields["verdicts"], "verdicts", VERDICTS, "a verdict that can be allowed")
        if "at_most" in fields:
            values["at_most"] = self._count(fields["at_most"], "at_most")
            values["at_most_node"] = fields["at_most"]
        if len(self.reader.mistakes) > before or not values:
            return None
        return AllowedFailure(**values)

    def _allowed_skips(self, node: yaml.Node, name: str) -> tuple[AllowedSkip, ...]:
        return tuple(filter(None, map(self._allowed_skip, self._entries(node, name))))

    def _allowed_skip(self, node: yaml.Node) -> AllowedSkip | None:
        before = len(self.reader.mistakes)
        fields = self.reader.fields(node, "an allowed skip", ("cells", "tests", "contains", "reason"), ("reason",))
        values = self._texts_and_selector(node, fields, ("reason", "contains"))
        if len(self.reader.mistakes) > before or not values:
            return None
        return AllowedSkip(**values)

    def _texts_and_selector(self, node: yaml.Node, fields: dict[str, yaml.Node],
                            texts: tuple[str, ...]) -> dict[str, Any]:
        """What allowed failures and allowed skips have alike."""
        values: dict[str, Any] = {name: self.reader.text(fields[name], name) for name in texts if name in fields}
        selector = self._cells_or_tests(node, fields)
        if selector is not None:
            values["cells"] = selector
        return values

    def _cells_or_tests(self, node: yaml.Node, fields: dict[str, yaml.Node]) -> Selector | None:
        """What an entry is for: cells by their axes, or tests by their node ids."""
        if "cells" in fields and "tests" in fields:
            self.reader.wrong(node, "this entry has both `cells` and `tests`; expected one of them")
            return None
        if "cells" in fields:
            return self._selector(fields["cells"], "cells")
        if "tests" in fields:
            return Selector({}, fields["tests"], tests=self._texts(fields["tests"], "tests", alone=True))
        self.reader.wrong(node, "this entry has neither `cells` nor `tests`; expected one of them")
        return None

    def _selector(self, node: yaml.Node, what: str) -> Selector:
        values: dict[str, tuple[Scalar, ...]] = {}
        axes: dict[str, yaml.Node] = {}
        entries = self.reader.entries(node, what)
        if not entries and isinstance(node, yaml.MappingNode):
            self.reader.wrong(node, f"{what}: no axis is named, so every cell matches; expected at least one")
        for axis, key, value in entries:
            values[axis], axes[axis] = self._axis_values(axis, value), key
        return Selector(values, node, axes)

    def _axis_values(self, axis: str, node: yaml.Node) -> tuple[Scalar, ...]:
        what = f"axis {axis!r}"
        values = []
        for item in self.reader.items(node, what, alone=True):
            value = self.reader.scalar(item, what)
            if not isinstance(value, Missing):
                values.append(value)
        return tuple(values)

    def _pass_rates(self, node: yaml.Node, name: str) -> tuple[PassRate, ...]:
        """One rate for an axis (or for ``total``), or one for each of its values."""
        rates = []
        for axis, key, value in self.reader.entries(node, name):
            if isinstance(value, yaml.MappingNode):
                rates += self._rates_by_value(axis, value)
            else:
                rates.append(self._pass_rate(axis, value, key))
        return tuple(filter(None, rates))

    def _rates_by_value(self, axis: str, node: yaml.MappingNode) -> list[PassRate | None]:
        # All values first, then all rates: mistakes are told in this order.
        values = [self.reader.scalar(key, f"axis {axis!r}") for key, _ in node.value]
        rates = []
        for value, (key, rate) in zip(values, node.value, strict=True):
            if not isinstance(value, Missing):
                only = Selector({axis: (value,)}, key, {axis: key})
                rates.append(self._pass_rate(axis, rate, key, only))
        return rates

    def _pass_rate(self, axis: str, node: yaml.Node, place: yaml.Node, only: Selector | None = None) -> PassRate | None:
        rate = self.reader.number(node, f"pass_rate of {axis!r}", whole=False, most=1)
        if rate is None:
            return None
        # `total` is no axis: the rate is of all cells.
        if axis == "total":
            return PassRate(rate, place, only=only)
        return PassRate(rate, place, axis, only)
