"""Article: everything that the report says of one cell, in the order in which somebody mends it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pytest_torchcompile.page.cell_numbers import benchmark_section, kernels_section, numbers_section, times_section
from pytest_torchcompile.page.ledger_tables import compiles_section, eager_frames_section, graph_breaks_section
from pytest_torchcompile.page.markup import (
    ROWS,
    Child,
    Html,
    anchor,
    badge,
    cut,
    hint,
    join,
    more_note,
    place,
    section,
    tag,
)
from pytest_torchcompile.report.causes import effect_of, first_with_problem, root_check
from pytest_torchcompile.report.facts import Facts, Problem, Verdict

__all__ = ["article"]

_HAVE_TABLES: Final = frozenset({"compiles", "graph_breaks", "recompiles", "kernels", "benchmark"})
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
    parts = [_checks_section(facts, source), tag("p", "again ", tag("code", again), class_="again"),
             *_ledger_tables(facts, source), *_other_ranks(facts, source), numbers_section(facts),
             kernels_section(facts, source), times_section(facts), benchmark_section(facts), _other_sections(facts)]
    return tag(
        "article", _article_head(facts, before), parts,
        tag("p", tag("a", "close", href="#overview"), class_="close"),
        id=anchor(facts.id), class_="cell", tabindex=-1, aria_label=f"{facts.id}: {facts.status}",
    )  # fmt: skip


def _article_head(facts: Facts, before: Child) -> Html:
    axes = [join(tag("span", f"{name} ", tag("b", value)), " ") for name, value in facts.axes.items()]
    lane = tag("p", _LANES[facts.lane], class_="quiet") if facts.lane in _LANES else None
    leaks = None
    if facts.leaks:
        leaks = tag("p", cut(f"Changed torch's settings, which were put back: {'; '.join(facts.leaks)}"))
    return tag("header", tag("h2", badge(facts.status), " ", tag("bdi", facts.id)), tag("p", axes, class_="axes"),
               lane, before, leaks)


def _ledger_tables(facts: Facts, source: str) -> list[Html]:
    tables = (graph_breaks_section(facts, source), compiles_section(facts, source), eager_frames_section(facts, source))
    return [table for table in tables if table]


def _other_ranks(facts: Facts, source: str) -> Iterator[Html]:
    """The ledgers of the other ranks, folded."""
    for number, rank in enumerate(facts.others, 1):
        tables = _ledger_tables(rank, source)
        if tables:
            yield tag("details", tag("summary", f"rank {number}"), tables)


def _checks_section(facts: Facts, source: str) -> Html:
    quiet = [verdict for verdict in facts.verdicts if not verdict.problems and not verdict.note]
    loud = [verdict for verdict in facts.verdicts if verdict.problems or verdict.note]
    # Stable: equals stay in the order in which the checks are judged.
    loud.sort(key=lambda verdict: _worst_first(verdict, facts))
    items = []
    before: Verdict | None = None
    for verdict in loud:
        said = join(_what_it_says(verdict, facts, source))
        # A cell without a result has one reason, which each of its checks repeats.
        if before is not None and (verdict.problems, verdict.note) == (before.problems, before.note):
            said = tag("p", f"the same as {before.check}")
        items.append(tag("li", badge(verdict.verdict), " ", tag("b", verdict.check), said))
        before = verdict
    if quiet:
        badges = [join(badge(verdict.verdict), f" {verdict.check}  ") for verdict in quiet]
        items.append(tag("li", badges, class_="quiet"))
    return section("Checks", tag("ul", items, class_="checks"))


def _worst_first(verdict: Verdict, facts: Facts) -> tuple[bool, int]:
    """The worst first, then what only follows from another check; what passes with a note comes last."""
    worst = 0
    for problem in verdict.problems:
        follows = root_check(verdict, problem, facts.verdicts) or first_with_problem(verdict, problem, facts.verdicts)
        if not follows:
            worst = max(worst, effect_of(verdict, problem).severity)
    return verdict.verdict == "pass", -worst


def _what_it_says(verdict: Verdict, facts: Facts, source: str) -> Iterator[Child]:
    if verdict.note:
        yield tag("p", cut(verdict.note))
    for problem in verdict.problems[:ROWS]:
        root = root_check(verdict, problem, facts.verdicts)
        first = first_with_problem(verdict, problem, facts.verdicts)
        if root:
            yield tag("p", f"follows from {root}: ", cut(problem.message), class_="quiet")
        elif first:
            yield tag("p", f"the cell has no result, as {first} tells: ", cut(problem.message), class_="quiet")
        else:
            yield _problem_block(problem, source)
    yield more_note(len(verdict.problems))


def _problem_block(problem: Problem, source: str) -> Html:
    where = tag("p", place(problem.file, problem.line, source)) if problem.file else None
    # A break's evidence is its place again, which stands above; the section on graph breaks has the rest.
    repeated = problem.file and problem.evidence.startswith(f"{problem.place} (")
    evidence = tag("pre", cut(problem.evidence)) if problem.evidence and not repeated else None
    return tag("div", tag("p", cut(problem.message), class_="message"), where, evidence, hint(problem.hint),
               class_="problem")


def _other_sections(facts: Facts) -> Html | None:
    """Sections that this page has no table for, as they are; and the environment where it is another one."""
    others = {}
    for name, content in facts.sections.items():
        if content and name not in _HAVE_TABLES and name not in facts.compared:
            others[name] = content
    own = facts.observation.get("environment")
    if own:
        # Only a cell that ran elsewhere than the others has one.
        others["environment of this cell"] = own
    if not others:
        return None
    folded = [tag("details", tag("summary", name), tag("pre", cut(_as_json(content)))) for name, content in
              others.items()]
    return section("Also recorded", folded)


def _as_json(content: Mapping[str, Any]) -> str:
    try:
        return json.dumps(content, indent=1, ensure_ascii=False)
    except RecursionError:
        return "nested too deeply to be shown"
