"""What the compiler made of each cell in two runs: which graphs and kernels are others now. No torch.

A report holds keys only (:mod:`pytest_torchcompile.gauges.generated_code`). The texts lie in ``code`` beside it, one
file for each key, so that equal code is kept once whatever the number of cells and runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_torchcompile.bounded_folder import tidy_folder
from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gauges.code_pieces import NOTHING, CodePiece, changed_pairs, difference_lines, graph_pieces
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.facts import as_list, as_mapping, as_text
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.report.safe_output import CODE, FOLDER, harmless_text, replace_file

__all__ = ["SHOWN_CHANGES", "CodeChange", "CodeChanges", "CodeStore", "change_difference", "change_lines",
           "change_summary", "change_title", "compare_code", "pieces_in_words", "run_command", "store_of"]

_LARGEST: Final = 128 << 20
"""Bytes of a store, above which the texts that were written longest ago go."""
SHOWN_CHANGES: Final = 8
"""Changes that are shown with what differs; the others are named."""


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
            # Texts are tidied away when the folder grows, and are no part of a report: to lack one is no error.
            return self._file_of(key).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def tidy(self, largest: int = _LARGEST) -> None:
        """Remove the oldest texts until the folder is small enough, and what a killed run has left half-written."""
        tidy_folder(self.folder, ".txt", largest)

    def _file_of(self, key: str) -> Path:
        return self.folder / f"{key}.txt"


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
    places: int = 1
    """How many graphs or kernels of all cells it is: the same code may be there more than once."""

    @property
    def happened(self) -> str:
        """``changed``, ``new`` or ``gone``."""
        if not self.old:
            return "new"
        return "changed" if self.new else "gone"


@dataclass
class CodeChanges:
    """What differs between two runs. Cells without code, which compiled nothing, count as compared."""

    graphs: int = 0
    """Of the cells that both runs have, in the new one."""
    kernels: int = 0
    changed_graphs: int = 0
    """Those that the old run has not in that cell; also new ones, which nothing of the old run stands beside."""
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

    def places(self, kind: str, happened: str) -> int:
        """How many graphs or kernels are changed, new or gone, each counted in every cell."""
        places = 0
        for change in self.changes:
            if change.kind == kind and change.happened == happened:
                places += change.places
        return places


def compare_code(old_cells: Iterable[Mapping[str, Any]], new_cells: Iterable[Mapping[str, Any]]) -> CodeChanges:
    """Compare the code of two runs, cell by cell. Cells are those of reports."""
    old_pieces, new_pieces = _pieces_by_cell(old_cells), _pieces_by_cell(new_cells)
    found = CodeChanges(
        only_old=[cell for cell in old_pieces if cell not in new_pieces],
        only_new=[cell for cell in new_pieces if cell not in old_pieces],
    )
    places: dict[_ChangedCode, list[tuple[str, str]]] = {}
    for cell, new in new_pieces.items():
        if cell not in old_pieces:
            continue
        old = old_pieces[cell]
        if old is None or new is None:
            found.unknown.append(cell)
            continue
        _count_pieces(found, new)
        for before, now in changed_pairs(old, new):
            piece = now or before or NOTHING
            changed = _ChangedCode(piece.kind, (before or NOTHING).key, (now or NOTHING).key)
            places.setdefault(changed, []).append((cell, piece.name))
            if now is not None:
                found.changed_graphs += piece.kind == "graph"
                found.changed_kernels += piece.kind == "kernel"
    found.changes = [_one_change(changed, where) for changed, where in places.items()]
    # Kernels first: of a graph that only calls another kernel the kernel tells more.
    found.changes.sort(key=lambda change: (change.kind != "kernel", -len(change.cells)))
    return found


class _ChangedCode(NamedTuple):
    """The same change in several places is one: what it was and what it is."""

    kind: str
    old_key: str
    new_key: str


def _count_pieces(found: CodeChanges, pieces: Iterable[CodePiece]) -> None:
    """Count a cell that both runs have code of."""
    found.compared += 1
    for piece in pieces:
        found.graphs += piece.kind == "graph"
        found.kernels += piece.kind == "kernel"


def _one_change(changed: _ChangedCode, places: Sequence[tuple[str, str]]) -> CodeChange:
    """``places``: cell and name of each piece that changed so; it is called by the first name."""
    cells = tuple(dict.fromkeys(cell for cell, _ in places))
    _, name = places[0]
    return CodeChange(changed.kind, name, changed.old_key, changed.new_key, cells, len(places))


def _pieces_by_cell(cells: Iterable[Mapping[str, Any]]) -> dict[str, list[CodePiece] | None]:
    """The code of each cell; None where none was recorded."""
    by_cell: dict[str, list[CodePiece] | None] = {}
    for cell in cells:
        sections = as_mapping(as_mapping(cell.get("observation")).get("sections"))
        recorded = as_mapping(sections.get("compiles")).get("code")
        pieces: list[CodePiece] | None = None
        if isinstance(recorded, list):
            pieces = []
            for graph in recorded:
                pieces += _pieces_of_graph(as_mapping(graph))
        by_cell[as_text(cell.get("id"))] = pieces
    return by_cell


def _pieces_of_graph(graph: Mapping[str, Any]) -> Iterator[CodePiece]:
    name = as_text(graph.get("graph"))
    kernels = []
    for kernel in as_list(graph.get("kernels")):
        match kernel:
            case [str(kernel_name), str(key)]:
                kernels.append((kernel_name, key))
    yield from graph_pieces(name, as_text(graph.get("key")), kernels)


def change_lines(found: CodeChanges, old: CodeStore, new: CodeStore) -> Iterator[str]:
    """What differs, as text: one line for all, then each change once with its difference, where the texts are kept."""
    yield change_summary(found)
    for cells, what in (
        (found.unknown, "with no code recorded in one of the runs"), (found.only_old, "only in the old run"),
        (found.only_new, "only in the new run"),
    ):  # fmt: skip
        if cells:
            yield f"{count(len(cells), 'cell')} {what}: {harmless_text(first_names(cells))}"
    for number, change in enumerate(found.changes):
        # An empty line before each difference, and one behind the last of them.
        if number <= SHOWN_CHANGES:
            yield ""
        yield harmless_text(change_title(change))
        if number < SHOWN_CHANGES:
            for line in change_difference(change, old, new):
                yield f"  {line}"


def change_summary(found: CodeChanges) -> str:
    """``0 of 206 kernels and 0 of 41 graphs changed in 12 cells``."""
    return f"{pieces_in_words(found)} in {count(found.compared, 'cell')}"


def pieces_in_words(found: CodeChanges) -> str:
    """``4 of 24 kernels and 26 of 87 graphs changed or new, 10 graphs gone``; what is gone is none of the 87."""
    how = "changed"
    if found.places("kernel", "new") or found.places("graph", "new"):
        how = "changed or new"
    words = (f"{found.changed_kernels} of {count(found.kernels, 'kernel')} and {found.changed_graphs} of "
             f"{count(found.graphs, 'graph')} {how}")
    gone = []
    for kind in ("kernel", "graph"):
        number = found.places(kind, "gone")
        if number:
            gone.append(count(number, kind))
    return f"{words}, {' and '.join(gone)} gone" if gone else words


def change_title(change: CodeChange) -> str:
    """One change in a line, with its first cells."""
    return f"{_what_happened(change)}, in {count(len(change.cells), 'cell')}: {first_names(change.cells)}"


def _what_happened(change: CodeChange) -> str:
    if change.happened == "gone":
        return f"no {change.kind} {change.name} any more"
    return f"{change.happened} {change.kind} {change.name}"


def change_difference(change: CodeChange, old: CodeStore, new: CodeStore) -> Iterator[str]:
    """What differs, line by line; where a text was not kept, that alone."""
    texts: list[str] = []
    for key, store in ((change.old, old), (change.new, new)):
        text = store.read(key) if key else ""
        if text is None:
            yield f"the text of {harmless_text(key)} is not in {harmless_text(str(store.folder))}"
            return
        texts.append(text)
    for line in difference_lines(*texts):
        yield harmless_text(line)


def run_command(given: argparse.Namespace) -> int:
    """``pytest-torchcompile code``."""
    found = compare_code(read_report(given.old).cells, read_report(given.new).cells)
    if given.json:
        print(json.dumps({**asdict(found), "same": found.is_same}, indent=1))
    else:
        for line in change_lines(found, store_of(given.old), store_of(given.new)):
            print(line)
    if not found.compared:
        raise ReportError(f"{given.old}, {given.new}: no cell of which both have code, so nothing can be said; "
                          "expected two reports of one matrix, by versions that record it")
    return 0 if found.is_same else 1


def store_of(report: str) -> CodeStore:
    """The store of a report: beside it, or in the ``.compile-matrix`` that it lies in or beside."""
    beside = Path(report).absolute().parent
    for folder in (beside, *beside.parents):
        for store in (folder / CODE, folder / FOLDER / CODE):
            if store.is_dir() and FOLDER in store.parts:
                return CodeStore(store)
    return CodeStore(beside / CODE)
