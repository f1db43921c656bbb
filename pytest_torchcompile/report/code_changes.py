"""What the compiler made of each cell in two runs: which graphs and kernels are others now. No torch.

A report holds keys only (:mod:`pytest_torchcompile.gauges.generated_code`). The texts lie in ``code`` beside it, one
file for each key, so that equal code is kept once whatever the number of cells and runs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.facts import as_list, as_mapping, as_text
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.report.safe_output import CODE, FOLDER, harmless_text, replace_file

__all__ = ["CodeChange", "CodeChanges", "CodeStore", "change_lines", "compare_code", "run_command"]

_LARGEST: Final = 128 << 20
"""Bytes of a store, above which the texts that were written longest ago go."""
_SHOWN_CHANGES: Final = 8
"""Changes that are shown with what differs; the others are named."""
_SHOWN_LINES: Final = 60
"""Lines of one difference."""


class CodeStore:
    """The folder of texts. What cannot be written is not kept, and no run fails for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, texts: Mapping[str, str]) -> None:
        """Keep each text under its key; one that is there only becomes younger."""
        for key, text in texts.items():
            file = self._file_of(key)
            with contextlib.suppress(OSError):
                if file.exists():
                    os.utime(file)
                else:
                    replace_file(file, text)

    def read(self, key: str) -> str | None:
        """The text of a key; None where it was not kept."""
        # A key comes out of a report: it must not lead out of the folder.
        if not key.isalnum():
            return None
        try:
            return self._file_of(key).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def tidy(self, largest: int = _LARGEST) -> None:
        """Remove the oldest texts until the folder is small enough, and what a killed run has left half-written."""
        files: list[tuple[float, int, Path]] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                status = entry.stat()
                files.append((status.st_mtime, status.st_size, Path(entry.path)))
        left = sum(size for _, size, _ in files)
        for written, size, file in sorted(files):
            is_half = file.suffix != ".txt" and time.time() - written > 3600
            if left <= largest and not is_half:
                continue
            with contextlib.suppress(OSError):
                file.unlink()
                left -= size

    def _file_of(self, key: str) -> Path:
        return self.folder / f"{key}.txt"


@dataclass(frozen=True)
class _Piece:
    """A graph or a kernel of a cell."""

    kind: str
    """``graph`` or ``kernel``."""
    graph: str
    """Its own name, or that of the graph that it is of: ``0/0 forward``."""
    name: str
    """``0/0 forward``, or ``0/0 forward: cpp_fused_relu_0``."""
    key: str


_NOTHING: Final = _Piece("", "", "", "")
"""Beside what is new or gone."""


@dataclass(frozen=True)
class CodeChange:
    """One piece of code that is another now, new, or gone, and the cells in which it is."""

    kind: str
    name: str
    """As it is called in the first of its cells."""
    old: str
    """Its key before; empty for what is new."""
    new: str
    """Its key now; empty for what is gone."""
    cells: tuple[str, ...]


@dataclass
class CodeChanges:
    """What differs between two runs. Cells without code, which compiled nothing, count as compared."""

    graphs: int = 0
    """Of the cells that both runs have, in the new one."""
    kernels: int = 0
    changed_graphs: int = 0
    """Those that the old run has not in that cell."""
    changed_kernels: int = 0
    compared: int = 0
    """Cells of both runs."""
    unknown: list[str] = field(default_factory=list)
    """Cells of both runs of which one recorded no code: it did not run, or an older version ran it."""
    only_old: list[str] = field(default_factory=list)
    only_new: list[str] = field(default_factory=list)
    changes: list[CodeChange] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether nothing differs in the cells of which both runs recorded code."""
        return not self.changes


def compare_code(old_cells: Iterable[Mapping[str, Any]], new_cells: Iterable[Mapping[str, Any]]) -> CodeChanges:
    """Compare the code of two runs, cell by cell. Cells are those of reports."""
    old_pieces, new_pieces = _pieces_by_cell(old_cells), _pieces_by_cell(new_cells)
    found = CodeChanges(
        only_old=[cell for cell in old_pieces if cell not in new_pieces],
        only_new=[cell for cell in new_pieces if cell not in old_pieces],
    )
    cells_of: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for cell, new in new_pieces.items():
        if cell not in old_pieces:
            continue
        old = old_pieces[cell]
        if old is None or new is None:
            found.unknown.append(cell)
            continue
        found.compared += 1
        found.graphs += sum(piece.kind == "graph" for piece in new)
        found.kernels += sum(piece.kind == "kernel" for piece in new)
        for before, now in _changed_pairs(old, new):
            piece = now or before or _NOTHING
            key = (piece.kind, (before or _NOTHING).key, (now or _NOTHING).key)
            cells_of.setdefault(key, []).append((cell, piece.name))
            if now is not None:
                found.changed_graphs += piece.kind == "graph"
                found.changed_kernels += piece.kind == "kernel"
    for (kind, old_key, new_key), places in cells_of.items():
        cells = tuple(dict.fromkeys(cell for cell, _ in places))
        found.changes.append(CodeChange(kind, places[0][1], old_key, new_key, cells))
    # Kernels first: of a graph that only calls another kernel the kernel tells more.
    found.changes.sort(key=lambda change: (change.kind != "kernel", -len(change.cells)))
    return found


def _pieces_by_cell(cells: Iterable[Mapping[str, Any]]) -> dict[str, list[_Piece] | None]:
    """The code of each cell; None where none was recorded."""
    by_cell: dict[str, list[_Piece] | None] = {}
    for cell in cells:
        sections = as_mapping(as_mapping(cell.get("observation")).get("sections"))
        recorded = as_mapping(sections.get("compiles")).get("code")
        pieces = None
        if isinstance(recorded, list):
            pieces = [piece for graph in recorded for piece in _pieces_of_graph(as_mapping(graph))]
        by_cell[as_text(cell.get("id"))] = pieces
    return by_cell


def _pieces_of_graph(graph: Mapping[str, Any]) -> Iterator[_Piece]:
    name = as_text(graph.get("graph"))
    yield _Piece("graph", name, name, as_text(graph.get("key")))
    for kernel in as_list(graph.get("kernels")):
        match kernel:
            case [str(kernel_name), str(key)]:
                yield _Piece("kernel", name, f"{name}: {kernel_name}", key)


def _changed_pairs(old: Sequence[_Piece], new: Sequence[_Piece]) -> Iterator[tuple[_Piece | None, _Piece | None]]:
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


def _without(pieces: Sequence[_Piece], others: Counter[tuple[str, str]]) -> Iterator[_Piece]:
    """The pieces that are left when each of the others has taken its own away."""
    for piece in pieces:
        if others[piece.kind, piece.key]:
            others[piece.kind, piece.key] -= 1
        else:
            yield piece


def change_lines(found: CodeChanges, old: CodeStore, new: CodeStore) -> Iterator[str]:
    """What differs, as text: one line for all, then each change once with its difference, where the texts are kept."""
    yield (f"{found.changed_kernels} of {count(found.kernels, 'kernel')} and {found.changed_graphs} of "
           f"{count(found.graphs, 'graph')} changed in {count(found.compared, 'cell')}")
    for cells, what in (
        (found.unknown, "with no code recorded in one of the runs"), (found.only_old, "only in the old run"),
        (found.only_new, "only in the new run"),
    ):  # fmt: skip
        if cells:
            yield f"{count(len(cells), 'cell')} {what}: {harmless_text(first_names(cells))}"
    for number, change in enumerate(found.changes):
        if number <= _SHOWN_CHANGES:
            yield ""
        yield harmless_text(f"{_what_happened(change)}, in {count(len(change.cells), 'cell')}: "
                            f"{first_names(change.cells)}")
        if number < _SHOWN_CHANGES:
            yield from _difference(change, old, new)


def _what_happened(change: CodeChange) -> str:
    if not change.old:
        return f"new {change.kind} {change.name}"
    if not change.new:
        return f"no {change.kind} {change.name} any more"
    return f"changed {change.kind} {change.name}"


def _difference(change: CodeChange, old: CodeStore, new: CodeStore) -> Iterator[str]:
    texts: list[list[str]] = []
    for key, store in ((change.old, old), (change.new, new)):
        text = store.read(key) if key else ""
        if text is None:
            yield f"  the text of {harmless_text(key)} is not in {harmless_text(str(store.folder))}"
            return
        texts.append(text.splitlines())
    before, now = texts
    lines = list(difflib.unified_diff(before, now, "old", "new", lineterm="", n=2))
    for line in lines[:_SHOWN_LINES]:
        yield f"  {harmless_text(line)}"
    if len(lines) > _SHOWN_LINES:
        yield f"  and {count(len(lines) - _SHOWN_LINES, 'more line')}"


def run_command(given: argparse.Namespace) -> int:
    """``pytest-torchcompile code``."""
    found = compare_code(read_report(given.old).cells, read_report(given.new).cells)
    if given.json:
        print(json.dumps({**asdict(found), "same": found.is_same}, indent=1))
    else:
        for line in change_lines(found, _store_of(given.old), _store_of(given.new)):
            print(line)
    if not found.compared:
        raise ReportError(f"{given.old}, {given.new}: no cell of which both have code, so nothing can be said; "
                          "expected two reports of one matrix, by versions that record it")
    return 0 if found.is_same else 1


def _store_of(report: str) -> CodeStore:
    """The store of a report: beside it, or in the ``.compile-matrix`` that it lies in or beside."""
    beside = Path(report).absolute().parent
    for folder in (beside, *beside.parents):
        for store in (folder / CODE, folder / FOLDER / CODE):
            if store.is_dir() and FOLDER in store.parts:
                return CodeStore(store)
    return CodeStore(beside / CODE)
