"""Graphs out of the texts that torch records of each stage: nodes with type, user's line and inputs. No torch.

The ledger keeps these texts (:attr:`pytest_torchcompile.Ledger.texts`). Their format is that of
``GraphModule.print_readable`` (torch/fx/graph.py, torch 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pytest_torchcompile.ledger.records import Text

__all__ = ["STAGES", "GraphNode", "SavedTensor", "Stage", "bytes_of_type", "lines_with_prefixes", "read_graph",
           "read_stages", "saved_tensors"]

STAGES: Final = {
    "dynamo": "what Dynamo traced of the function, in the user's own operators",
    "joint": "AOTAutograd: ATen operators, forward and backward in one graph, decomposed",
    "forward": "the forward part: it returns what the backward needs too",
    "backward": "the backward part: it begins with what was saved",
    "post_grad": "what Inductor makes code of, after its own rewrites",
    "code": "the code that Inductor wrote",
}
"""Each stage of the compiler, in order, and what its text is."""

_PLACE: Final = re.compile(r"^\s*# (?:Backward of forward node: )?File: (.+?):(\d+) in ")
"""Torch 2.15 begins the comments of a backward graph with other words; without them in torch 2.8 to 2.14."""
_NO_PLACE: Final = re.compile(r"^\s*# No stacktrace found")
_NODE: Final = re.compile(r'^\s*(\w+): "(.*?)" = (.+)$')
_UNTYPED: Final = re.compile(r"^\s*(\w+)() = ([\w.]+\(.*)$")
_CALLED: Final = re.compile(r"^([\w.]+)\(")
_ARGUMENT: Final = re.compile(r'^\s*(\w+): "(.*?)"\s*(?:,|#|$)')
_IN_SIGNATURE: Final = re.compile(r'(\w+): "(.*?)"')
_NAME: Final = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*=(?!=))")
"""A word that may be a node: no later part of a dotted name, as ``mul`` in ``aten.mul.Tensor``, and no keyword."""
_QUOTED: Final = re.compile(r"'[^']*'")
_BODY: Final = re.compile(r"^(\s*)class (\S+)\(torch\.nn\.Module\):")
_TYPE: Final = re.compile(r"^([a-z]+\d+\w*)\[([^\]]*)\]")
_LENGTH: Final = 60
"""Of an expression that is shown."""
_BITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True)
class GraphNode:
    """One node of a graph."""

    name: str
    """Of a subgraph with that before it: ``true_graph_0.sin``."""
    target: str
    """What is called: ``torch.ops.aten.addmm.default``; ``input`` for what the graph is given, ``expression`` for an
    item or a sum."""
    type: str
    """As torch writes it: ``f32[4, 600][600, 1]cpu``."""
    place: str = ""
    """``file:line`` of the user's code."""
    inputs: tuple[str, ...] = ()
    value: str = ""
    """Of an expression: what it is, like ``var_mean[0]``."""

    @property
    def body(self) -> str:
        """The subgraph that it is in, as a branch of ``torch.cond``; empty for the graph itself."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Stage:
    """What one stage made of one graph."""

    compile_id: str
    stage: str
    """One of :data:`STAGES`."""
    graph: int
    """The how-manieth of its stage."""
    text: str
    nodes: tuple[GraphNode, ...] = ()


@dataclass(frozen=True)
class SavedTensor:
    """What the forward pass keeps for the backward pass."""

    name: str
    type: str
    bytes: int | None
    """None where a size is open."""
    given: bool
    """It is an input of the graph, such as a parameter, so it is in memory anyway."""
    place: str = ""
    """``file:line`` of the line that computed it."""


def read_stages(texts: Iterable[Text]) -> list[Stage]:
    """The stages of all compiles, in order of time."""
    stages: list[Stage] = []
    counts: dict[str, int] = {}
    for text in texts:
        if text.stage not in STAGES:
            continue
        number = counts.get(text.stage, 0)
        counts[text.stage] = number + 1
        nodes = () if text.stage == "code" else tuple(read_graph(text.text))
        stages.append(Stage(text.compile_id, text.stage, number, text.text, nodes))
    return stages


def read_graph(text: str) -> list[GraphNode]:
    """Nodes of a graph in order, its inputs first.

    >>> read_graph('''class GraphModule(torch.nn.Module):
    ...     def forward(self, x: "f32[4]"):
    ...         # File: net.py:7 in forward, code: return x.sin()
    ...         sin: "f32[4]" = torch.ops.aten.sin.default(x);  x = None
    ...         return (sin,)''')[1]
    GraphNode(name='sin', target='torch.ops.aten.sin.default', type='f32[4]', place='net.py:7', inputs=('x',), value='')
    """
    nodes: dict[str, GraphNode] = {}
    place = ""
    for prefix, line in lines_with_prefixes(text):
        if match := _PLACE.match(line):
            place = f"{match[1]}:{match[2]}"
        elif _NO_PLACE.match(line):
            place = ""
        elif "def forward(" in line or _ARGUMENT.match(line):
            for word, kind in _IN_SIGNATURE.findall(line):
                nodes[prefix + word] = GraphNode(prefix + word, "input", kind)
        elif match := _NODE.match(line) or _UNTYPED.match(line):
            name = prefix + match[1]
            # Behind the semicolon names are freed.
            value = match[3].partition(";")[0]
            called = _CALLED.match(value)
            words = [prefix + word for word in _NAME.findall(_QUOTED.sub("''", value))]
            used = tuple(dict.fromkeys(word for word in words if word in nodes))
            if called:
                nodes[name] = GraphNode(name, called[1], match[2], place, used)
            else:
                nodes[name] = GraphNode(name, "expression", match[2], place, used, value[:_LENGTH])
    return list(nodes.values())


def lines_with_prefixes(text: str) -> Iterator[tuple[str, str]]:
    """Each line of a graph's text, and what its names begin with: ``true_graph_0.`` in that subgraph, else nothing.

    Subgraphs are classes within the class of the graph, and one may have the names of another.
    """
    around: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := _BODY.match(line):
            indent = len(match[1])
            around = [(outer, name) for outer, name in around if outer < indent]
            around.append((indent, match[2]))
        yield "".join(f"{name}." for _indent, name in around[1:]), line


def saved_tensors(forward: Iterable[GraphNode], backward: Iterable[GraphNode]) -> list[SavedTensor]:
    """What a backward graph is given beside gradients of the outputs, which torch calls ``tangents``."""
    made = {node.name: node for node in forward}
    saved = []
    for node in backward:
        if node.body or node.target != "input" or node.name.startswith("tangents"):
            continue
        source = made.get(node.name)
        given = source is not None and source.target == "input"
        saved.append(SavedTensor(node.name, node.type, bytes_of_type(node.type), given, source.place if source else ""))
    return saved


def bytes_of_type(kind: str) -> int | None:
    """Bytes of a tensor of such a type; None where a size is open, or it is no tensor.

    >>> bytes_of_type("f32[4, 600][600, 1]cpu"), bytes_of_type("f32[s0, 4]"), bytes_of_type("Sym(s0)")
    (9600, None, None)
    """
    match = _TYPE.match(kind)
    bits = match and _BITS.search(match[1])
    if not match or not bits:
        return None
    count = int(bits[1]) // 8
    for size in filter(None, match[2].split(",")):
        if not size.strip().isdigit():
            return None
        count *= int(size)
    return count
