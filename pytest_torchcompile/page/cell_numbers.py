"""The numbers of a cell: how far off its values are, which kernels were generated, where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from pytest_torchcompile.page.markup import ROWS, Html, columns, cut, join, more_note, place, section, tag
from pytest_torchcompile.quantity import readable_seconds
from pytest_torchcompile.report.facts import Compared, Facts, Generated

__all__ = ["benchmark_section", "kernels_section", "numbers_section", "times_section"]

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


def kernels_section(facts: Facts, source: str) -> Html | None:
    """What each generated graph calls."""
    graphs = facts.generated
    if not graphs:
        return None
    tables = [_kernels_table(graph, source) for graph in graphs[:ROWS]]
    return section("Generated kernels", tables, more_note(len(graphs)))


def _kernels_table(graph: Generated, source: str) -> Html:
    rows = []
    for kernel in graph.generated[:ROWS]:
        lines = join(_source_line(line, source) for line in kernel.lines)
        rows.append(_kernel_row(kernel.name, ", ".join(kernel.ops), kernel.calls, lines))
    for name, calls in graph.library.items():
        rows.append(_kernel_row(name, "library", calls))
    for name, calls in graph.fallbacks.items():
        rows.append(_kernel_row(name, "not generated", calls))
    return tag("table", tag("caption", f"graph {graph.compile_id}, {graph.stage}"),
               columns("kernel", "operators", "calls", "lines"), tag("tbody", rows), class_="kernels")  # fmt: skip


def _kernel_row(name: str, operators: str, calls: float, lines: Html | None = None) -> Html:
    return tag("tr", tag("td", tag("code", name)), tag("td", operators), tag("td", f"{calls:g}", class_="number"),
               tag("td", lines))  # fmt: skip


def _source_line(line: str, source: str) -> Html:
    file, _, number = line.rpartition(":")
    # `isdigit` alone takes superscripts too, and `int` refuses a number of thousands of digits.
    if file and number.isascii() and number.isdigit() and len(number) < 9:
        return join(place(file, int(number), source), " ")
    return join(tag("code", line), " ")


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
    """The table of the check `benchmark`."""
    text = facts.section("benchmark").get("text")
    if not text or not isinstance(text, str):
        return None
    return section("Eager and compiled side by side", tag("pre", text))
