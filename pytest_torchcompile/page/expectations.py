"""Expectations: what the matrix asked of the cells: which may fail, why and until when, and the limits in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.checks import LIMITS
from pytest_torchcompile.page.markup import ROWS, Html, columns, join, link, more_note, section, tag
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.facts import Facts

__all__ = ["expectations_section", "plan_section"]

_SIGNS: Final = {"min": "≥", "max": "≤"}
_VERBS: Final = {"xfail": "expected to fail", "skip": "to be skipped"}


def plan_section(facts: Facts) -> Html | None:
    """Of one cell: what a rule expects of it, and the limits that it was judged by."""
    expected = _expectation_in_words(facts.planned)
    limits = [join(tag("span", text), " ") for text in _limits_in_words(facts)]
    if not expected and not limits:
        return None
    return section("What was asked of it", tag("p", expected) if expected else None,
                   tag("p", "limits: ", limits, class_="axes") if limits else None)


def _expectation_in_words(planned: Mapping[str, Any]) -> str:
    verb = _VERBS.get(str(planned.get("outcome")))
    if verb is None:
        return ""
    text = f"{verb.capitalize()}, by {planned['rule'] or 'a rule'}: {_reason_of(planned)}"
    if planned["until"]:
        text += f", until {planned['until']}"
    return text


def _reason_of(planned: Mapping[str, Any]) -> str:
    reason = str(planned["reason"] or "no reason told")
    return f"{reason} ({planned['issue']})" if planned["issue"] else reason


def _limits_in_words(facts: Facts) -> Iterator[str]:
    """``recompiles ≤ 1`` for each limit that a check of this cell compared with."""
    limits: Mapping[str, Any] = facts.planned.get("limits", {})
    for name, value in limits.items():
        known = LIMITS.get(name)
        # Without a share of its own, `compiles` excuses what allowed graph breaks leave to eager.
        if name == "coverage" and value == 1 and limits.get("graph_breaks", 0) > 0:
            yield f"coverage {_SIGNS['min']} 1, except at allowed graph breaks"
            continue
        yield f"{name} {_SIGNS[known.kind] if known else '='} {value:g}"


def expectations_section(cells: Sequence[Facts]) -> Html | None:
    """Of the run: each rule by which cells may fail, and each limit; with the number of cells."""
    rules: dict[tuple[str, str, str], list[Facts]] = {}
    limits: dict[str, int] = {}
    for facts in cells:
        planned = facts.planned
        if planned.get("outcome") == "xfail":
            key = (str(planned["rule"]), _reason_of(planned), str(planned["until"]))
            rules.setdefault(key, []).append(facts)
        for text in _limits_in_words(facts):
            limits[text] = limits.get(text, 0) + 1
    if not rules and not limits:
        return None
    return tag("section", _rules_table(rules), _limits_list(limits, len(cells)), class_="expected", id="expected",
               aria_label="Expected failures and limits")


def _rules_table(rules: Mapping[tuple[str, str, str], Sequence[Facts]]) -> Html | None:
    if not rules:
        return None
    rows = []
    for (rule, reason, until), cells in list(rules.items())[:ROWS]:
        failing = sum(cell.status == "xfail" for cell in cells)
        links = [tag("a", cell.id, href=link(cell.id)) for cell in cells[:ROWS]]
        folded = tag("details", tag("summary", f"{failing} of {count(len(cells), 'cell')} failed"),
                     tag("div", links, more_note(len(cells)), class_="cells"))
        rows.append(tag("tr", tag("td", reason, tag("p", rule, class_="quiet")),
                        tag("td", until or "no day", class_="number"), tag("td", folded)))
    return join(tag("h2", "Expected failures"),
                tag("table", columns("reason and rule", "until", "cells"), tag("tbody", rows)), more_note(len(rules)))


def _limits_list(limits: Mapping[str, int], cells: int) -> Html | None:
    if not limits:
        return None
    items = []
    for text, number in list(limits.items())[:ROWS]:
        where = "every cell" if number == cells else count(number, "cell")
        items.append(join(tag("span", tag("b", text), f" in {where}"), " "))
    return join(tag("h2", "Limits in use"), tag("p", items, class_="axes"), more_note(len(limits)))
