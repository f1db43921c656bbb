"""The numbers of a cell: how far off its values are, which kernels were generated, where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from pytest_torchcompile.page.markup import Html, join, tag
from pytest_torchcompile.page.pieces import ROWS, columns, cut, more, place, section
from pytest_torchcompile.quantity import readable_seconds
from pytest_torchcompile.report.facts import Facts, Generated

__all__ = ["benchmark", "kernels", "numerics", "timing"]

LEAVES: Final = 8


def numerics(facts: Facts) -> Html | None:
    """How much is bitwise equal, and the outputs and gradients that are farthest off."""
    sections = facts.compared
    if not sections:
        return None
    told = [f"{name}: {found.get('bitwise', '?')} of {found.get('compared', '?')} bitwise equal"
            for name, found in sections.items()]
    rows = [tag("tr", tag("td", leaf.name, tag("p", f"{leaf.dtype} {leaf.call}", class_="quiet")),
                tag("td", cut(leaf.message) if leaf.message else _times(leaf.rms)),
                *(tag("td", _value(value), class_="number") for value in (leaf.eager, leaf.compiled, leaf.expected)))
            for leaf in facts.leaves[:LEAVES]]
    head = columns("what, where it is worst", "error / noise", "eager", "compiled", "expected")
    table = tag("table", head, tag("tbody", *rows)) if rows else None
    return section("Numbers", tag("p", "; ".join(told)), table, more(len(facts.leaves), LEAVES))


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ×"


def _value(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else "" if value is None else str(value)


def kernels(facts: Facts, source: str) -> Html | None:
    """What each generated graph calls."""
    found = facts.generated
    if not found:
        return None
    return section("Generated kernels", *(_graph(graph, source) for graph in found[:ROWS]), more(len(found)))


def _graph(graph: Generated, source: str) -> Html:
    rows = [_row(kernel.name, ", ".join(kernel.ops), kernel.calls, join(_line(line, source) for line in kernel.lines))
            for kernel in graph.generated[:ROWS]]
    for what, calls in (("library", graph.library), ("not generated", graph.fallbacks)):
        rows += [_row(name, what, count) for name, count in calls.items()]
    return tag("table", tag("caption", f"graph {graph.compile_id}, {graph.stage}"),
               columns("kernel", "operators", "calls", "lines"), tag("tbody", *rows), class_="kernels")  # fmt: skip


def _row(name: str, operators: str, calls: float, lines: Html | None = None) -> Html:
    return tag("tr", tag("td", tag("code", name)), tag("td", operators), tag("td", f"{calls:g}", class_="number"),
               tag("td", lines))  # fmt: skip


def _line(line: str, source: str) -> Html:
    file, _, number = line.rpartition(":")
    known = file and number.isascii() and number.isdigit() and len(number) < 9
    return join(place(file, int(number), source) if known else tag("code", line), " ")


def timing(facts: Facts) -> Html | None:
    """Wall seconds of the cell by phase, and of all its compiles by stage."""
    if not facts.seconds:
        return None
    stages: Counter[str] = Counter()
    for found in facts.compiles:
        stages.update(found.seconds_in)
    total = [] if facts.total_seconds is None else [("whole cell", facts.total_seconds)]
    return section("Time", _times_of("run", [*total, *facts.seconds.items()]), _times_of("compiling", stages.items()))


def benchmark(facts: Facts) -> Html | None:
    """The table of the check `benchmark`."""
    text = facts.section("benchmark").get("text")
    return section("Eager and compiled side by side", tag("pre", text)) if text and isinstance(text, str) else None


def _times_of(title: str, times: Iterable[tuple[str, float]]) -> Html | None:
    shown = [join(tag("span", f"{name} ", tag("b", readable_seconds(value))), " ") for name, value in times]
    return tag("p", f"{title}: ", *shown, class_="axes") if shown else None
