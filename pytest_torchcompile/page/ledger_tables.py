"""The ledger of a cell: where graphs broke, what was compiled and why again, what ran eagerly."""

from __future__ import annotations

from collections import Counter
from typing import Final

from pytest_torchcompile.ledger.explain import recompile_advice
from pytest_torchcompile.ledger.records import Compile, EagerFrame, GraphBreak
from pytest_torchcompile.page.markup import ROWS, Child, Html, columns, cut, hint, join, more_note, place, section, tag
from pytest_torchcompile.quantity import count, listed_counts, readable_seconds
from pytest_torchcompile.report.facts import Facts

__all__ = ["compiles_section", "eager_frames_section", "graph_breaks_section"]

STAGES: Final = ("dynamo", "aot", "inductor", "kernels")
KINDS: Final = {
    "first": "first compile", "recompile": "recompile", "instance": "another instance",
    "raced": "raced by another thread", "resume": "rest after a break", "backward": "backward",
}  # fmt: skip
OWNERS: Final = {"mine": "your code", "third_party": "a library", "torch": "torch"}


def graph_breaks_section(facts: Facts, source: str) -> Html | None:
    """Each place where a graph ended early; what the check has said already is not said again."""
    breaks = facts.graph_breaks
    if not breaks:
        return None
    # Texts of the checks above; a break repeats none of them.
    texts: list[str] = []
    for verdict in facts.verdicts:
        for problem in verdict.problems:
            texts += (problem.message, problem.hint)
    said = "\n".join(texts)
    items = [_break_item(broken, said, source) for broken in breaks[:ROWS]]
    return section(f"Graph breaks ({len(breaks)})", tag("ul", items), more_note(len(breaks)))


def _break_item(broken: GraphBreak, said: str, source: str) -> Html:
    number: Html | str = broken.gb_id
    # Reports are data from elsewhere: a link of another scheme could run something.
    if broken.link.startswith("https://"):
        number = tag("a", broken.gb_id or "more", href=broken.link)
    lines = [broken.reason, broken.explanation]
    if broken.whole_frame:
        lines.append("torch cannot resume after it, so the whole function ran eagerly")
    return tag(
        "li", place(broken.file, broken.line, source), f" in {broken.function} " if broken.function else " ",
        tag("span", OWNERS.get(broken.owner, broken.owner), class_="quiet"), " ", number,
        [tag("p", cut(line)) for line in lines if line and line not in said],
        hint(broken.hint) if broken.hint not in said else None,
    )  # fmt: skip


def compiles_section(facts: Facts, source: str) -> Html | None:
    """Every compile as a row, with the time of its stages as a bar; a recompile says why."""
    if not facts.compiles and not facts.graphs:
        return None
    longest = max((compiled.seconds for compiled in facts.compiles), default=0.0)
    advised: set[str] = set()
    rows: list[Html] = []
    for compiled in facts.compiles[:ROWS]:
        rows.append(_compile_row(compiled, longest, source))
        if compiled.kind == "recompile":
            rows.append(_recompile_row(compiled, advised))
    parts: list[Child] = [tag("p", _summary(facts))]
    if rows:
        head = columns("compile", "what", "where", "during", "ops", "time")
        parts.append(tag("table", head, tag("tbody", rows), class_="ledger"))
        parts.append(tag("p", "time in ", map(_stage_key, STAGES), class_="quiet"))
    return section("Compiles", parts, more_note(len(facts.compiles)))


def _stage_key(stage: str) -> Html:
    return join(tag("i", class_=f"key {stage}"), f" {stage}  ")


def _summary(facts: Facts) -> str:
    parts = [count(len(facts.compiles), "compile"), f"{len(facts.recompiles) or 'none'} of them recompiles",
             f"{count(len(facts.graphs), 'graph')} ran {count(facts.graph_runs, 'time')} in all"]
    if facts.coverage is not None:
        parts.append(f"{facts.coverage:.0%} of the operator calls ran inside them")
    answers: Counter[str] = Counter()
    for compiled in facts.compiles:
        # In the order in which they were first given.
        answers.update(compiled.caches)
    if answers:
        parts.append(f"caches: {listed_counts(answers)}")
    return "; ".join(parts)


def _compile_row(compiled: Compile, longest: float, source: str) -> Html:
    resumed = f", from line {compiled.resumed_at}" if compiled.resumed_at else ""
    return tag(
        "tr",
        tag("td", compiled.compile_id), tag("td", KINDS.get(compiled.kind, compiled.kind)),
        tag("td", compiled.function, " ", place(compiled.file, compiled.line, source), resumed),
        tag("td", compiled.during), tag("td", compiled.ops or "", class_="number"),
        tag("td", _stages_bar(compiled, longest), readable_seconds(compiled.seconds), class_="number"),
        class_=compiled.kind if compiled.kind in KINDS else None,
    )  # fmt: skip


def _recompile_row(compiled: Compile, advised: set[str]) -> Html:
    """Why it was compiled again. ``advised``: what was advised above; the same advice is given once."""
    why: Child = tag("code", cut(compiled.reason))
    if compiled.what:
        why = [tag("code", compiled.what), f"  {compiled.expected or '?'} → {compiled.actual or '?'}"]
    advice = recompile_advice(compiled)
    new = advice not in advised
    advised.add(advice)
    content = join(tag("b", f"{compiled.cause}: "), why, hint(advice) if new else None)
    return tag("tr", tag("td"), tag("td", content, colspan=5), class_="why")


def _stages_bar(compiled: Compile, longest: float) -> Html:
    """Stages of one compile as lengths, of 60 units for the longest compile of the cell.

    A page has thousands of bars: each is written as briefly as can be, and its title is its name for screen readers.
    """
    lines, start = [], 0.0
    for stage in STAGES:
        width = 60 * compiled.seconds_in.get(stage, 0.0) / longest if longest > 0 else 0.0
        # A report may claim a stage longer than the longest compile; it gets no bar.
        if 0 < width <= 60:
            lines.append(tag("path", class_=stage, d=f"M{start:.1f} 4h{width:.1f}"))
            start += width
    title = ", ".join(f"{stage} {readable_seconds(value)}" for stage, value in compiled.seconds_in.items())
    return tag("svg", tag("title", title), lines, viewBox="0 0 60 8", role="img", class_="bar")


def eager_frames_section(facts: Facts, source: str) -> Html | None:
    """Frames that were asked to compile and ran eagerly."""
    frames = facts.eager_frames
    if not frames:
        return None
    items = [_frame_item(frame, source) for frame in frames[:ROWS]]
    return section(f"Ran eagerly ({len(frames)})", tag("ul", items), more_note(len(frames)))


def _frame_item(frame: EagerFrame, source: str) -> Html:
    where = place(frame.file, frame.line, source) if frame.file else None
    return tag("li", tag("b", frame.kind), f" {frame.part} ", where, tag("p", cut(frame.reason)))
