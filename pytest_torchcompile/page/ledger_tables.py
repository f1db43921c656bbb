"""The ledger of a cell: where graphs broke, what was compiled and why again, what ran eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.ledger.explain import recompile_advice
from pytest_torchcompile.ledger.records import Compile, GraphBreak
from pytest_torchcompile.page.markup import Child, Html, join, tag
from pytest_torchcompile.page.pieces import ROWS, columns, cut, hint, more, place, section
from pytest_torchcompile.quantity import readable_seconds
from pytest_torchcompile.report.facts import Facts

__all__ = ["compiles", "eager_frames", "graph_breaks"]

STAGES: Final = ("dynamo", "aot", "inductor", "kernels")
KINDS: Final = {
    "first": "first compile", "recompile": "recompile", "instance": "another instance",
    "raced": "raced by another thread", "resume": "rest after a break", "backward": "backward",
}  # fmt: skip
OWNERS: Final = {"mine": "your code", "third_party": "a library", "torch": "torch"}


def graph_breaks(facts: Facts, source: str) -> Html | None:
    """Each place where a graph ended early; what the check has said already is not said again."""
    found = facts.graph_breaks
    if not found:
        return None
    said = "\n".join(f"{p.message}\n{p.hint}" for verdict in facts.verdicts for p in verdict.problems)
    items = [_break(each, said, source) for each in found[:ROWS]]
    return section(f"Graph breaks ({len(found)})", tag("ul", *items), more(len(found)))


def _break(found: GraphBreak, said: str, source: str) -> Html:
    whole = "torch cannot resume after it, so the whole function ran eagerly" if found.whole_frame else ""
    number = tag("a", found.gb_id or "more", href=found.link) if found.link.startswith("https://") else found.gb_id
    told = (found.reason, found.explanation, whole)
    return tag(
        "li", place(found.file, found.line, source), f" in {found.function} " if found.function else " ",
        tag("span", OWNERS.get(found.owner, found.owner), class_="quiet"), " ", number,
        *(tag("p", cut(line)) for line in told if line and line not in said),
        hint(found.hint) if found.hint not in said else None,
    )  # fmt: skip


def compiles(facts: Facts, source: str) -> Html | None:
    """Every compile as a row, with the time of its stages as a bar; a recompile says why."""
    if not facts.compiles and not facts.graphs:
        return None
    longest = max((c.seconds for c in facts.compiles), default=0.0)
    advised: set[str] = set()
    rows = [row for c in facts.compiles[:ROWS] for row in _compile(c, longest, source, advised)]
    table = tag("table", columns("compile", "what", "where", "during", "ops", "time"), tag("tbody", *rows),
                class_="ledger")  # fmt: skip
    legend = tag("p", "time in ", *map(_key, STAGES), class_="quiet")
    return section("Compiles", tag("p", _summary(facts)), (table, legend) if rows else None, more(len(facts.compiles)))


def _key(stage: str) -> Html:
    swatch = tag("rect", width=8, height=8, class_=stage)
    return join(tag("svg", swatch, viewBox="0 0 8 8", class_="key", aria_hidden="true"), f" {stage}  ")


def _summary(facts: Facts) -> str:
    recompiles, runs = len(facts.recompiles), sum(g.runs for g in facts.graphs)
    told = [_many(len(facts.compiles), "compile"), f"{recompiles or 'none'} of them recompiles",
            f"{_many(len(facts.graphs), 'graph')} ran {_many(runs, 'time')} in all"]
    if facts.coverage is not None:
        told.append(f"{facts.coverage:.0%} of the operator calls ran inside them")
    if caches := [answer for c in facts.compiles for answer in c.caches]:
        told.append("caches: " + ", ".join(f"{caches.count(a)} {a}" for a in dict.fromkeys(caches)))
    return "; ".join(told)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _compile(found: Compile, longest: float, source: str, advised: set[str]) -> Iterator[Html]:
    """One row, and for a recompile why; the same advice is given once."""
    resumed = f", from line {found.resumed_at}" if found.resumed_at else ""
    yield tag(
        "tr",
        tag("td", found.compile_id), tag("td", KINDS.get(found.kind, found.kind)),
        tag("td", found.function, " ", place(found.file, found.line, source), resumed),
        tag("td", found.during), tag("td", found.ops or "", class_="number"),
        tag("td", _bar(found, longest), readable_seconds(found.seconds), class_="number"),
        class_=found.kind if found.kind in KINDS else None,
    )  # fmt: skip
    if found.kind == "recompile":
        change = f"  {found.expected or '?'} → {found.actual or '?'}"
        why: Child = [tag("code", found.what), change] if found.what else tag("code", cut(found.reason))
        new = (text := recompile_advice(found)) not in advised
        advised.add(text)
        told = join(tag("b", f"{found.cause}: "), why, hint(text) if new else None)
        yield tag("tr", tag("td"), tag("td", told, colspan=5), class_="why")


def _bar(found: Compile, longest: float) -> Html:
    """Stages of one compile as lengths, of 60 units for the longest compile of the cell."""
    rects, start = [], 0.0
    for stage in STAGES:
        width = 60 * found.seconds_in.get(stage, 0.0) / longest if longest > 0 else 0.0
        if 0 < width <= 60:
            rects.append(tag("rect", x=f"{start:.1f}", y=0, width=f"{width:.1f}", height=8, class_=stage))
            start += width
    told = ", ".join(f"{stage} {readable_seconds(value)}" for stage, value in found.seconds_in.items())
    return tag("svg", tag("title", told), *rects, viewBox="0 0 60 8", role="img", aria_label=told, class_="bar")


def eager_frames(facts: Facts, source: str) -> Html | None:
    """Frames that were asked to compile and ran eagerly."""
    found = facts.eager_frames
    if not found:
        return None
    rows = [tag("li", tag("b", f.kind), f" {f.function} ", place(f.file, f.line, source) if f.file else None,
                tag("p", cut(f.reason))) for f in found[:ROWS]]
    return section(f"Ran eagerly ({len(found)})", tag("ul", *rows), more(len(found)))
