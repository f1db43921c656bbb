"""Pieces of code, the graphs and kernels of a cell, and which of them differ between two compiles. No torch."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["COMPILED_STAGES", "NOTHING", "CodePiece", "changed_pairs", "difference_lines", "graph_pieces"]

COMPILED_STAGES: Final = ("dynamo", "joint", "forward", "backward", "post_grad", "code")
"""From the first to the last: each is made of the one before."""
_SHOWN_LINES: Final = 60
"""Lines of one difference."""


@dataclass(frozen=True)
class CodePiece:
    """A graph or a kernel of a cell."""

    kind: str
    """``graph`` or ``kernel``."""
    graph: str
    """Its own name, or that of the graph that it is of: ``0/0 forward``."""
    name: str
    """``0/0 forward``, or ``0/0 forward: cpp_fused_relu_0``."""
    key: str


NOTHING: Final = CodePiece("", "", "", "")
"""Beside what is new or gone."""


def graph_pieces(graph: str, key: str, kernels: Iterable[tuple[str, str]]) -> Iterator[CodePiece]:
    """A graph and its kernels; of each kernel the name and the key are given."""
    yield CodePiece("graph", graph, graph, key)
    for name, kernel_key in kernels:
        yield CodePiece("kernel", graph, f"{graph}: {name}", kernel_key)


def changed_pairs(
    old: Sequence[CodePiece], new: Sequence[CodePiece]
) -> Iterator[tuple[CodePiece | None, CodePiece | None]]:
    """Each piece that only one of both has, beside the other's of the same name, or else the next in the same graph."""
    gone = list(_without(old, Counter((piece.kind, piece.key) for piece in new)))
    come = list(_without(new, Counter((piece.kind, piece.key) for piece in old)))
    gone_names = {(piece.kind, piece.name) for piece in gone}
    # Those with a name that the other has too choose first.
    come.sort(key=lambda piece: (piece.kind, piece.name) not in gone_names)
    for now in come:
        candidates = [piece for piece in gone if (piece.kind, piece.graph) == (now.kind, now.graph)]
        candidates.sort(key=lambda piece: piece.name != now.name)
        before = candidates[0] if candidates else None
        if before is not None:
            gone.remove(before)
        yield before, now
    for before in gone:
        yield before, None


def _without(pieces: Sequence[CodePiece], others: Counter[tuple[str, str]]) -> Iterator[CodePiece]:
    """The pieces that are left when each of the others has taken its own away."""
    for piece in pieces:
        if others[piece.kind, piece.key]:
            others[piece.kind, piece.key] -= 1
        else:
            yield piece


def difference_lines(old: str, new: str, old_name: str = "old", new_name: str = "new") -> list[str]:
    """What differs between two texts, as ``diff -u`` shows it; the end of a long difference is left out."""
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=2))
    left_out = len(lines) - _SHOWN_LINES
    if left_out > 1:
        return [*lines[:_SHOWN_LINES], f"and {left_out} more lines"]
    return lines
