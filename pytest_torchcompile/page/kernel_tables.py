"""Tables of kernels: what each generated graph calls, and what each call reads, writes and keeps from memory."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_torchcompile.lowering.kernel_records import readable_bytes
from pytest_torchcompile.page.markup import ROWS, Html, anchor, columns, join, more_note, place, section, tag
from pytest_torchcompile.report.facts import Facts, Generated, KernelTouch, TouchedTensor

__all__ = ["kernels_section"]


def kernels_section(facts: Facts, source: str, listed: dict[Html, str]) -> Html | None:
    """What each generated graph calls; or, with a link, the cell that has the very same list.

    :param listed: lists that the page has already, and the cell that each stands at; this one's is added.
    """
    graphs = facts.generated
    if not graphs:
        return None
    tables = [join(_kernels_table(graph, source), _memory_table(graph)) for graph in graphs[:ROWS]]
    content = join(tables, more_note(len(graphs)))
    first = listed.setdefault(content, facts.id)
    if first != facts.id:
        content = tag("p", "all that is listed is the same as at ", tag("a", first, href=f"#{anchor(first)}"))
    return section("Generated kernels", content)


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


# ------------------------------------------------------------------------------------------------ memory
def _memory_table(graph: Generated) -> Html | None:
    """Each call in order, with its tensors; a report without them has none."""
    if not graph.calls:
        return None
    rows = [_memory_row(call) for call in graph.calls[:ROWS]]
    counted = [call for call in graph.calls if call.counted]
    inside = sum(_bytes_of(call.kept_inside) for call in counted)
    touched = sum(_bytes_of(call.reads) + _bytes_of(call.writes) for call in counted)
    summary = f"what each call touches: {_size(touched)}; {_size(inside)} never reach memory"
    table = tag("table", columns("call", "reads", "writes", "never in memory"), tag("tbody", rows), class_="kernels")
    return tag("details", tag("summary", summary), table, more_note(len(graph.calls)))


def _memory_row(call: KernelTouch) -> Html:
    operators = ", ".join(target.removeprefix("aten.").removesuffix(".default") for target in call.operators)
    name = join(tag("code", call.name),
                tag("div", call.library or call.kind, ": " if operators else "", operators, class_="quiet"),
                tag("div", call.where, class_="quiet") if call.where else None)
    return tag("tr", tag("td", name), _tensors_cell(call.reads), _tensors_cell(call.writes),
               _tensors_cell(call.kept_inside))  # fmt: skip


def _tensors_cell(tensors: Iterable[TouchedTensor]) -> Html:
    lines = []
    for tensor in tensors:
        # What is kept inside has no name in memory, only that of its node.
        named = tensor.name or tensor.of
        lines.append(tag("div", tag("code", named), f" {tensor.tensor} {_size(tensor.bytes)}"))
    return tag("td", lines[:ROWS])


def _bytes_of(tensors: Iterable[TouchedTensor]) -> float:
    return sum(tensor.bytes for tensor in tensors)


def _size(count: float) -> str:
    return readable_bytes(int(count))
