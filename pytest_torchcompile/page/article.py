"""Article: everything that the report says of one cell, in the order in which somebody mends it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pytest_torchcompile.page.cell_numbers import benchmark, kernels, numerics, timing
from pytest_torchcompile.page.ledger_tables import compiles, eager_frames, graph_breaks
from pytest_torchcompile.page.markup import Child, Html, join, tag
from pytest_torchcompile.page.pieces import ROWS, anchor, badge, cut, hint, more, place, section
from pytest_torchcompile.report.causes import effect_of, first_with_problem, root_check
from pytest_torchcompile.report.facts import Facts, Problem, Verdict

__all__ = ["article"]

_SHOWN: Final = frozenset({"compiles", "graph_breaks", "recompiles", "kernels", "benchmark"})
"""Sections that an article has a table for, as it has for those that compare; others are shown as they are."""
_LANES: Final = {
    "ranks": "Several ranks: the checks judge all; below them is what rank 0 recorded, unless another is named.",
    "fake": "Fake lane: one process compiled as rank 0 of so many would. No number is judged.",
}


def article(facts: Facts, again: str, source: str = "", before: Child = None) -> Html:
    """One cell.

    :param again: the command that runs it again.
    :param source: address of a source file, with ``{file}`` and ``{line}``; empty: places are no links.
    :param before: what the baseline says of the cell.
    """
    parts = [_checks(facts, source), tag("p", "again ", tag("code", again), class_="again"),
             *_ledger(facts, source), *_ranks(facts, source), numerics(facts), kernels(facts, source), timing(facts),
             benchmark(facts), _others(facts)]
    axes = (join(tag("span", f"{name} ", tag("b", value)), " ") for name, value in facts.axes.items())
    leaks = f"Changed torch's settings, which were put back: {'; '.join(facts.leaks)}"
    return tag(
        "article",
        tag("header", tag("h2", badge(facts.status), " ", tag("bdi", facts.id)), tag("p", *axes, class_="axes"),
            tag("p", _LANES[facts.lane], class_="quiet") if facts.lane in _LANES else None, before,
            tag("p", cut(leaks)) if facts.leaks else None),
        *(part for part in parts if part),
        tag("p", tag("a", "close", href="#overview"), class_="close"),
        id=anchor(facts.id), class_="cell", tabindex=-1, aria_label=f"{facts.id}: {facts.status}",
    )  # fmt: skip


def _ledger(facts: Facts, source: str) -> Iterator[Html | None]:
    yield graph_breaks(facts, source)
    yield compiles(facts, source)
    yield eager_frames(facts, source)


def _ranks(facts: Facts, source: str) -> Iterator[Html]:
    """The ledgers of the other ranks, folded."""
    for number, rank in enumerate(facts.others, 1):
        if found := [part for part in _ledger(rank, source) if part]:
            yield tag("details", tag("summary", f"rank {number}"), *found)


def _checks(facts: Facts, source: str) -> Html:
    quiet = [v for v in facts.verdicts if not v.problems and not v.note]
    loud = sorted((v for v in facts.verdicts if v.problems or v.note), key=lambda verdict: _badness(verdict, facts))
    shown = []
    for number, verdict in enumerate(loud):
        before = loud[number - 1]
        same = number and (verdict.problems, verdict.note) == (before.problems, before.note)
        told = tag("p", f"the same as {before.check}") if same else join(_said(verdict, facts, source))
        shown.append(tag("li", badge(verdict.verdict), " ", tag("b", verdict.check), told))
    if quiet:
        shown.append(tag("li", *(join(badge(v.verdict), f" {v.check}  ") for v in quiet), class_="quiet"))
    return section("Checks", tag("ul", *shown, class_="checks"))


def _badness(verdict: Verdict, facts: Facts) -> tuple[bool, int]:
    """The worst first, then what only follows from another check; what passes with a note comes last."""
    everything = facts.verdicts
    effects = [effect_of(verdict, problem).severity for problem in verdict.problems
               if not (root_check(verdict, problem, everything) or first_with_problem(verdict, problem, everything))]
    return verdict.verdict == "pass", -max(effects, default=0)


def _said(verdict: Verdict, facts: Facts, source: str) -> Iterator[Child]:
    if verdict.note:
        yield tag("p", cut(verdict.note))
    for problem in verdict.problems[:ROWS]:
        if root := root_check(verdict, problem, facts.verdicts):
            yield tag("p", f"follows from {root}: ", cut(problem.message), class_="quiet")
            continue
        if first := first_with_problem(verdict, problem, facts.verdicts):
            yield tag("p", f"the cell has no result, as {first} tells: ", cut(problem.message), class_="quiet")
            continue
        yield _problem(problem, source)
    yield more(len(verdict.problems))


def _problem(problem: Problem, source: str) -> Html:
    # A break's evidence is its place again, which stands above; the section on graph breaks has the rest.
    again = problem.file and problem.evidence.startswith(f"{problem.place} (")
    return tag(
        "div", tag("p", cut(problem.message), class_="message"),
        tag("p", place(problem.file, problem.line, source)) if problem.file else None,
        tag("pre", cut(problem.evidence)) if problem.evidence and not again else None,
        hint(problem.hint), class_="problem",
    )  # fmt: skip


def _others(facts: Facts) -> Html | None:
    """Sections that this page has no table for, as they are; and the environment where it is another one."""
    others = {n: s for n, s in facts.sections.items() if s and n not in _SHOWN and n not in facts.compared}
    if own := facts.observation.get("environment"):
        others["environment of this cell"] = own
    shown = [tag("details", tag("summary", name), tag("pre", cut(_json(content)))) for name, content in others.items()]
    return section("Also recorded", *shown) if shown else None


def _json(content: Mapping[str, Any]) -> str:
    try:
        return json.dumps(content, indent=1, ensure_ascii=False)
    except RecursionError:
        return "nested too deeply to be shown"
