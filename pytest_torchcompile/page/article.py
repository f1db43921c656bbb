"""Article: everything that the report says of one cell, in the order in which somebody mends it.

Its numbers come last: how far off its values are, which kernels were generated, where the time went.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from pytest_torchcompile.observation import Problem
from pytest_torchcompile.page.expectations import plan_section
from pytest_torchcompile.page.kernel_tables import kernels_section
from pytest_torchcompile.page.ledger_tables import compiles_section, eager_frames_section, graph_breaks_section
from pytest_torchcompile.page.markup import (
    ROWS,
    Child,
    Html,
    again,
    anchor,
    badge,
    columns,
    cut,
    hint,
    join,
    more_note,
    place,
    section,
    tag,
)
from pytest_torchcompile.page.past_runs import label_of_run
from pytest_torchcompile.page.roofline_figure import step_roofline
from pytest_torchcompile.quantity import count, readable_age, readable_seconds
from pytest_torchcompile.report.causes import effect_of, first_with_problem, root_check
from pytest_torchcompile.report.facts import Compared, Facts, Verdict

__all__ = ["article", "benchmark_section", "numbers_section", "times_section"]

_HAVE_TABLES: Final = frozenset({"compiles", "graph_breaks", "recompiles", "kernels", "worth", "benchmark"})
"""Sections that an article has a table for, as it has for those that compare; others are shown as they are."""
_LANES: Final = {
    "ranks": "Several ranks: the checks judge all; below them is what rank 0 recorded, unless another is named.",
    "fake": "Fake lane: one process compiled as rank 0 of so many would. No number is judged.",
}


def article(facts: Facts, command: str, source: str = "", before: Child = None,
            listed: dict[Html, str] | None = None) -> Html:
    """One cell.

    :param command: the command that runs it again.
    :param source: address of a source file, with ``{file}`` and ``{line}``; empty: places are no links.
    :param before: what the baseline says of the cell.
    :param listed: lists of kernels that the page has, as :func:`kernels_section` takes them: many cells have the same.
    """
    listed = {} if listed is None else listed
    parts = [_checks_section(facts, source), again(command), plan_section(facts),
             *_ledger_tables(facts, source), *_other_ranks(facts, source), numbers_section(facts),
             kernels_section(facts, source, listed), times_section(facts), benchmark_section(facts),
             _other_sections(facts)]
    return tag(
        "article", _article_head(facts, before), parts,
        tag("p", tag("a", "back to the findings", href="#overview"), class_="close"),
        id=anchor(facts.id), class_="cell", tabindex=-1, aria_label=f"{facts.id}: {facts.status}",
    )  # fmt: skip


def _article_head(facts: Facts, before: Child) -> Html:
    axes = [join(tag("span", f"{name} ", tag("b", value)), " ") for name, value in facts.axes.items()]
    lane = tag("p", _LANES[facts.lane], class_="quiet") if facts.lane in _LANES else None
    leaks = None
    if facts.leaks:
        leaks = tag("p", cut(f"Changed torch's settings, which were put back: {'; '.join(facts.leaks)}"))
    return tag("header", tag("h2", badge(facts.status), " ", tag("bdi", facts.id)), tag("p", axes, class_="axes"),
               lane, _reused_note(facts), before, leaks)


def _reused_note(facts: Facts) -> Html | None:
    """Of a result of an earlier run: of which one, and how old it is."""
    origin = facts.reused
    if origin is None:
        return None
    run = label_of_run(origin if origin["commit"] else None, origin["run"])
    changed = ", with uncommitted changes" if origin["changed"] else ""
    age = readable_age(origin["age"])
    text = f"it was not run again. Its result is {age} old, of the run of {run}{changed}; " \
           "nothing that it rests on has changed since."
    if "comparisons" in origin:
        calls = count(origin["comparisons"], "comparison of its calls is", "comparisons of its calls are")
        text = f"it was compiled and run, to the same code and the same values as in the run of {run}{changed}, " \
               f"{age} ago. {calls} of that run."
    return tag("p", tag("b", "Reused: "), text, class_="reused-note")


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
    quiet: list[Verdict] = []
    loud: list[Verdict] = []
    for verdict in facts.verdicts:
        has_words = bool(verdict.problems or verdict.note)
        (loud if has_words else quiet).append(verdict)
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
    # One badge for all checks that have nothing to say and the same verdict.
    by_verdict: dict[str, list[str]] = {}
    for verdict in quiet:
        by_verdict.setdefault(verdict.verdict, []).append(verdict.check)
    for name, checks in by_verdict.items():
        items.append(tag("li", badge(name), f" {', '.join(checks)}", class_="quiet"))
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
    folded = []
    for name, content in others.items():
        folded.append(tag("details", tag("summary", name), tag("pre", cut(_as_json(content)))))
    return section("Also recorded", folded)


def _as_json(content: Mapping[str, Any]) -> str:
    try:
        return json.dumps(content, indent=1, ensure_ascii=False)
    # A report from elsewhere may hold anything, and one odd section must not cost the reader the whole page.
    except RecursionError:
        return "nested too deeply to be shown"


# ---------------------------------------------------------------------------------------------------------- the numbers
LEAVES: Final = 8


def numbers_section(facts: Facts) -> Html | None:
    """How much is bitwise equal, and the outputs and gradients that are farthest off."""
    if not facts.compared:
        return None
    counts = []
    for name, found in facts.compared.items():
        counts.append(f"{name}: {found.get('bitwise', '?')} of {found.get('compared', '?')} bitwise equal")
    leaves = facts.leaves
    table = None
    if leaves:
        head = columns("what, where it is worst", "error / noise", "eager", "compiled", "expected")
        table = tag("table", head, tag("tbody", map(_leaf_row, leaves[:LEAVES])))
    return section("Numbers", tag("p", "; ".join(counts)), table, more_note(len(leaves), LEAVES))


def _leaf_row(leaf: Compared) -> Html:
    name = tag("td", leaf.name, tag("p", f"{leaf.dtype} {leaf.call}", class_="quiet"))
    error = tag("td", cut(leaf.message) if leaf.message else _in_noise(leaf.rms))
    values = [tag("td", _value_text(value), class_="number") for value in (leaf.eager, leaf.compiled, leaf.expected)]
    return tag("tr", name, error, values)


def _in_noise(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ×"


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    return "" if value is None else str(value)


def times_section(facts: Facts) -> Html | None:
    """Wall seconds of the cell by phase, and of all its compiles by stage."""
    if not facts.seconds:
        return None
    run = list(facts.seconds.items())
    if facts.total_seconds is not None:
        # The whole first: the phases are parts of it.
        run.insert(0, ("whole cell", facts.total_seconds))
    stages: Counter[str] = Counter()
    for compiled in facts.compiles:
        stages.update(compiled.seconds_in)
    return section("Time", _line_of_times("run", run), _line_of_times("compiling", stages.items()))


def _line_of_times(title: str, times: Iterable[tuple[str, float]]) -> Html | None:
    shown = [join(tag("span", f"{name} ", tag("b", readable_seconds(value))), " ") for name, value in times]
    return tag("p", f"{title}: ", shown, class_="axes") if shown else None


def benchmark_section(facts: Facts) -> Html | None:
    """The table of the check `worth`, which was called `benchmark`."""
    text = (facts.section("worth") or facts.section("benchmark")).get("text")
    if not text or not isinstance(text, str):
        return None
    return section("Eager and compiled side by side", tag("pre", text), step_roofline(facts.section("worth")))
