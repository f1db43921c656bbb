"""Graphs as pictures and in the form of ``torch.export``: an SVG of few nodes, dot for Graphviz, text. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final

from pytest_torchcompile.explain.graph_texts import GraphNode, Stage, lines_with_prefixes

__all__ = ["MOST_DRAWN", "dot_text", "export_text", "svg_text"]

MOST_DRAWN: Final = 40
"""A graph of more nodes is no picture that anybody reads; Graphviz lays it out better."""
_WIDTH: Final = 190
_HEIGHT: Final = 34
_ACROSS: Final = 16
_DOWN: Final = 30
_LETTERS: Final = 30
"""Of a label: what fits into a box."""
_STYLE: Final = ("text{font:11px monospace;fill:#24292f}rect{fill:#f6f8fa;stroke:#8c959f}.input rect{fill:#ddf4ff}"
                 "path{stroke:#8c959f;fill:none}")
_PARAMETER: Final = re.compile(r"^(?:L_)?self_(?:modules_)?(.+?)_(parameters|buffers)_(\w+?)_?$")
_NAME: Final = re.compile(r"\b[A-Za-z_]\w*\b")


def dot_text(stage: Stage) -> str:
    """The graph for Graphviz."""
    lines = ["digraph {", "  node [shape=box, fontname=monospace]"]
    for node in stage.nodes:
        label = f"{node.name}\\n{node.target}\\n{node.type}".replace('"', "'")
        lines.append(f'  "{node.name}" [label="{label}"]')
        lines += [f'  "{given}" -> "{node.name}"' for given in node.inputs]
    return "\n".join([*lines, "}", ""])


def svg_text(stage: Stage) -> str:
    """The graph as an SVG: each node below all that it takes."""
    places = _places(stage.nodes)
    columns = 1 + max((column for column, _row in places.values()), default=0)
    rows = 1 + max((row for _column, row in places.values()), default=0)
    size = f"{columns * (_WIDTH + _ACROSS) + _ACROSS} {rows * (_HEIGHT + _DOWN) + _DOWN}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" '
             f'aria-label="{stage.stage} graph">', f"<style>{_STYLE}</style>"]
    for node in stage.nodes:
        parts += [_edge(places[given], places[node.name]) for given in node.inputs]
    parts += [_box(node, *_corner(places[node.name])) for node in stage.nodes]
    return "\n".join([*parts, "</svg>", ""])


def _places(nodes: Sequence[GraphNode]) -> dict[str, tuple[int, int]]:
    """Column and row of each node, by name: a row for the longest way from an input."""
    places: dict[str, tuple[int, int]] = {}
    taken: dict[int, int] = {}
    for node in nodes:
        row = 1 + max((places[given][1] for given in node.inputs), default=-1)
        places[node.name] = taken.get(row, 0), row
        taken[row] = taken.get(row, 0) + 1
    return places


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    column, row = place
    return _ACROSS + column * (_WIDTH + _ACROSS), _DOWN + row * (_HEIGHT + _DOWN)


def _edge(above: tuple[int, int], below: tuple[int, int]) -> str:
    (left, top), (right, bottom) = _corner(above), _corner(below)
    return f'<path d="M{left + _WIDTH // 2} {top + _HEIGHT}L{right + _WIDTH // 2} {bottom}"/>'


def _box(node: GraphNode, left: int, top: int) -> str:
    kind = "input" if node.target == "input" else "call"
    called = node.type if kind == "input" else node.value or node.target.removeprefix("torch.ops.")
    return (f'<g class="{kind}"><title>{escape(node.name)} {escape(node.target)} {escape(node.type)} '
            f'{escape(node.place)}</title><rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
            f'<text x="{left + 6}" y="{top + 14}">{escape(node.name[:_LETTERS])}</text>'
            f'<text x="{left + 6}" y="{top + 28}">{escape(called[:_LETTERS])}</text></g>')


# ------------------------------------------------------------------------------------------------ as export prints
def export_text(stage: Stage, dynamo: Stage | None) -> str:
    """The graph as ``torch.export`` prints a program: its code, then a signature of its inputs and outputs.

    :param dynamo: Dynamo's graph of the same compile. It has the same inputs in the same order, and its names tell
        parameters and buffers.
    """
    inputs = _given_to(stage)
    sources: list[str] = []
    if dynamo is not None:
        sources = [node.name for node in _given_to(dynamo)]
    lines = ["ExportedProgram:", *(f"    {line}" for line in stage.text.splitlines()), "Graph signature:",
             "    # inputs"]
    for number, node in enumerate(inputs):
        # Where AOTAutograd has dropped or added some, nothing is known of their order.
        source = sources[number] if len(sources) == len(inputs) else ""
        lines.append(f"    {node.name}: {_kind_of_input(source)} {node.type}")
    lines.append("    # outputs")
    # The tuple that is returned may have a line for each of its parts.
    own = "\n".join(line for prefix, line in lines_with_prefixes(stage.text) if not prefix)
    returned = own.rpartition("return ")[2]
    known = {node.name: node.type for node in stage.nodes}
    for name in dict.fromkeys(_NAME.findall(returned)):
        if name in known:
            lines.append(f"    {name}: OUTPUT {known[name]}")
    return "\n".join([*lines, ""])


def _given_to(stage: Stage) -> list[GraphNode]:
    """Inputs of the graph itself: a subgraph is given what the graph has."""
    return [node for node in stage.nodes if node.target == "input" and not node.body]


def _kind_of_input(source: str) -> str:
    match = _PARAMETER.match(source)
    if match is None:
        return f"USER_INPUT target='{source}'" if source else "INPUT"
    kind = "PARAMETER" if match[2] == "parameters" else "BUFFER"
    return f"{kind} target='{match[1].replace('_modules_', '.')}.{match[3]}'"
