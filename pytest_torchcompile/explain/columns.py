"""Columns of the page: one for each stage of a compile, from the user's lines on the left to kernels on the right.

What comes from one line of the user's has the same number in each column (``data-p``), and one node of a graph the same
name (``data-n``): a click on any of them lights all of them up.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_torchcompile.explain.explanation import Explanation, total_bytes
from pytest_torchcompile.explain.explanation_records import TracedOperator
from pytest_torchcompile.explain.graph_texts import GraphNode, SavedTensor, Stage
from pytest_torchcompile.lowering.kernel_records import (
    KINDS,
    KernelCall,
    TensorAccess,
    calls_that_move,
    readable_bytes,
    readable_shape,
    subgraph_text,
)
from pytest_torchcompile.page.markup import Html, join, tag
from pytest_torchcompile.quantity import count

__all__ = ["compile_columns", "short_place"]

_TYPE: Final = re.compile(r"^\w+\[[^\]]*\]")
_PREFIXES: Final = re.compile(r"^torch\.ops\.|^torch\._C\._nn\.|^torch\.nn\.functional\.|^torch\.")


@dataclass(frozen=True)
class _Column:
    """One column."""

    title: str
    note: str
    rows: list[Html]
    kind: str = ""


def compile_columns(explained: Explanation, compile_id: str, places: Sequence[str]) -> Html:
    """All columns of one compile.

    :param places: the user's lines; a row says by its index which one it comes from.
    """
    marks = _Marks(compile_id, {place: number for number, place in enumerate(places)})
    columns = [_user_lines(explained, compile_id, marks)]
    for stage in explained.stages_of(compile_id, "dynamo"):
        columns.append(_graph_column("Dynamo", "what was traced of the function", stage, marks))
    columns += _decomposed_columns(explained, compile_id, marks)
    columns += _aot_columns(explained, compile_id, marks)
    kernels = [kernel for kernel in explained.kernels if kernel.compile_id == compile_id]
    for stage in explained.stages_of(compile_id, "post_grad"):
        of_graph = [kernel for kernel in kernels if kernel.graph == stage.graph]
        part = of_graph[0].stage if of_graph else "no kernels"
        note = "after its own rewrites; K: the kernel that computes it"
        columns.append(_graph_column(f"Inductor, {part}", note, stage, marks, _kernel_of_node(of_graph)))
        columns.append(_kernel_column(of_graph, part, marks))
    return tag("div", [_column(column) for column in columns if column.rows], class_="columns")


@dataclass(frozen=True)
class _Marks:
    """How rows are told to belong together."""

    compile_id: str
    numbers: dict[str, int]

    def row(self, place: str | Sequence[str], nodes: Iterable[str], *children: Html | str | None,
            class_: str = "row") -> Html:
        """A row that can be clicked."""
        given = [place] if isinstance(place, str) else place
        numbers = " ".join(str(self.numbers[known]) for known in given if known in self.numbers)
        names = " ".join(f"{self.compile_id}:{node}" for node in nodes)
        return tag("div", *children, class_=class_, tabindex="0", data_p=numbers or None, data_n=names or None)


def _column(column: _Column) -> Html:
    return tag("section", tag("h3", f"{column.title} ", tag("span", str(len(column.rows)), class_="quiet")),
               tag("p", column.note, class_="note"), tag("div", column.rows, class_="rows"),
               class_=f"column {column.kind}".strip())


def _user_lines(explained: Explanation, compile_id: str, marks: _Marks) -> _Column:
    used = {node.place for stage in explained.stages if stage.compile_id == compile_id for node in stage.nodes}
    rows = []
    for place in marks.numbers:
        if place in used:
            file, _, line = place.rpartition(":")
            code = linecache.getline(file, int(line)).strip()
            rows.append(marks.row(place, (), tag("code", code or "(no source)"),
                                  tag("span", short_place(place), class_="quiet place")))
    return _Column("Your code", "lines that were compiled; click one", rows, "lines")


def _graph_column(title: str, note: str, stage: Stage, marks: _Marks,
                  kernel_of: dict[str, list[int]] | None = None, saved: Iterable[SavedTensor] = ()) -> _Column:
    rows = []
    kept = {tensor.name: tensor for tensor in saved}
    for node in stage.nodes:
        if node.target == "input":
            continue
        tags: list[Html] = []
        for number in (kernel_of or {}).get(node.name, ()):
            tags.append(tag("span", f"K{number}", class_="k"))
        if node.name in kept:
            tags.append(tag("span", f"saved, {readable_bytes(kept[node.name].bytes or 0)}", class_="saved"))
        rows.append(marks.row(node.place, [node.name], *_node_text(node), *tags))
    return _Column(title, note, rows)


def _node_text(node: GraphNode) -> Iterator[Html | str]:
    yield tag("code", node.value or _short_target(node.target), class_="op")
    shown = _TYPE.match(node.type)
    yield tag("span", f"{node.name} {shown[0] if shown else node.type}".strip(), class_="quiet")


def _short_target(target: str) -> str:
    return _PREFIXES.sub("", target).removesuffix(".default")


def _decomposed_columns(explained: Explanation, compile_id: str, marks: _Marks) -> Iterator[_Column]:
    operators = [operator for operator in explained.operators if operator.compile_id == compile_id]
    if operators:
        kept = sum(not operator.by for operator in operators)
        yield _Column("ATen, before and after decomposition", f"{count(kept, 'operator')} kept as they are",
                      [_operator_row(operator, marks) for operator in operators], "wide")


def _operator_row(operator: TracedOperator, marks: _Marks) -> Html:
    before = tag("code", _short_target(operator.operator), class_="op")
    if not operator.by:
        return marks.row(operator.place, operator.nodes, before, tag("span", "kept", class_="quiet"))
    into = " ".join(_short_target(part).removeprefix("aten.") for part in operator.into) or "nothing"
    return marks.row(operator.place, operator.nodes, before, tag("span", "→ ", tag("code", into)),
                     tag("span", operator.by, class_="quiet place"))


def _aot_columns(explained: Explanation, compile_id: str, marks: _Marks) -> Iterator[_Column]:
    saved = explained.saved_of(compile_id)
    new = [tensor for tensor in saved if not tensor.given]
    for stage in explained.stages_of(compile_id, "forward"):
        note = "AOTAutograd's graph"
        if saved:
            note = f"{count(len(new), 'result')} of {readable_bytes(total_bytes(new))} saved for the backward pass"
        yield _graph_column("Forward", note, stage, marks, saved=new)
    for stage in explained.stages_of(compile_id, "backward"):
        yield _graph_column("Backward", "with the line of the forward pass that it belongs to", stage, marks)


def _kernel_of_node(kernels: Sequence[KernelCall]) -> dict[str, list[int]]:
    """Node to the kernels, from 1, that compute it: some are computed again where that costs less than memory."""
    found: dict[str, list[int]] = {}
    for number, kernel in enumerate(kernels, 1):
        for operator in kernel.operators:
            found.setdefault(operator.node, []).append(number)
    return found


def _kernel_column(kernels: Sequence[KernelCall], part: str, marks: _Marks) -> _Column:
    inside = sum(kernel.bytes_kept_inside for kernel in calls_that_move(kernels))
    rows = [_kernel_card(number, kernel, marks) for number, kernel in enumerate(kernels, 1)]
    return _Column(f"Kernels, {part}", f"{readable_bytes(inside)} never reach memory", rows, "wide")


def _kernel_card(number: int, kernel: KernelCall, marks: _Marks) -> Html:
    what = kernel.library or kernel.kind
    words = [f"{readable_bytes(kernel.bytes_read)} read", f"{readable_bytes(kernel.bytes_written)} written"]
    if kernel.kept_inside:
        words.append(f"{readable_bytes(kernel.bytes_kept_inside)} stay inside")
    if kernel.vectorised is not None:
        words.append("vectorised" if kernel.vectorised else "not vectorised")
    if kernel.subgraph:
        words.append(subgraph_text(kernel))
    if kernel.seconds is not None:
        words.append(f"{kernel.seconds * 1e6:.2f} µs a call")
    head = join(tag("span", f"K{number}", class_="k"), tag("code", kernel.name, class_="op"),
                tag("span", what, class_="what", title=KINDS[kernel.kind]),
                tag("div", ", ".join(words), class_="quiet"))
    inside = None
    if kernel.kept_inside:
        named = ", ".join(f"{operator.node} {readable_bytes(operator.bytes)}" for operator in kernel.kept_inside)
        inside = tag("p", tag("b", "never in memory "), named)
    operators = ", ".join(_short_target(operator.target) for operator in kernel.operators)
    more = tag(
        "details", tag("summary", "what it touches"),
        tag("p", tag("b", "operators "), operators) if operators else None,
        _tensor_table("reads", kernel.reads), _tensor_table("writes", kernel.writes), inside,
        tag("details", tag("summary", "its code"), tag("pre", kernel.source)) if kernel.source else None,
    )  # fmt: skip
    return marks.row(kernel.places, [operator.node for operator in kernel.operators], head, more, class_="row kernel")


def _tensor_table(title: str, tensors: Iterable[TensorAccess]) -> Html:
    rows = []
    for tensor in tensors:
        rows.append(tag("tr", tag("td", tag("code", tensor.name)), tag("td", tensor.of),
                        tag("td", readable_shape(tensor.shape, tensor.dtype)), tag("td", readable_bytes(tensor.bytes))))
    return tag("table", tag("caption", title), tag("tbody", rows))


def short_place(place: str) -> str:
    """A path from the current folder where it lies below, else its end."""
    file, _, line = place.rpartition(":")
    relative = os.path.relpath(file)
    if relative.startswith(".."):
        relative = "/".join(file.split("/")[-3:])
    return f"{relative}:{line}"
