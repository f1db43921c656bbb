"""The report file of a run: what is written where, and what of an earlier run is kept. Nothing is destroyed.

========================================  ===================================================================
the run judged                            what becomes of the report
========================================  ===================================================================
the whole matrix                          it is replaced; the one before goes to ``.compile-matrix/previous``
a part (``-k``, node ids, ``--lf``, ...)  its cells and tests are taken over into it (:mod:`.takeover`), and the
                                          part's own record is ``.compile-matrix/part/report.json``
nothing (``-k nothing``, a usage error)   it stays, with the mark that a later run began (:mod:`.earlier`)
tests only, by ``--json-report``          it is replaced; one that holds cells goes to ``.compile-matrix/previous``
one model (``--compile-model``)           it stays, without a mark: all of that run is in ``.compile-matrix/model``
========================================  ===================================================================

Of two runs at once the one that began later has the report. The other one's is replaced, or marked while that goes on.

Where a part cannot be taken over, because the report is of another matrix or shard, a whole report stays, marked.
Cells that a killed run was to judge, and that no run judged since, keep the report marked (:mod:`.earlier`).
In ``previous`` a report of a part does not displace that of a whole run, nor a journal that has its report that of a
run that was killed. So what is lost can always be had by one run that judges everything.
"""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.earlier import (
    INTERRUPTED,
    INTERRUPTED_RUN,
    LATER_RUN,
    later_run_mark,
    mark_earlier,
    mark_interrupted,
    planned_in,
    start_told_by,
)
from pytest_torchcompile.report.provenance import SEAL, add_seal
from pytest_torchcompile.report.reading import read_content
from pytest_torchcompile.report.safe_output import FOLDER, PART_FILE, PREVIOUS, behind_link, make_folder, replace_file
from pytest_torchcompile.report.strictjson import dumps
from pytest_torchcompile.report.takeover import is_whole, judged_cells, judges_all_cells, not_mergeable, take_over
from pytest_torchcompile.run.imported import edited_since

__all__ = ["ReportKeeper", "save_whole"]

BLOCK: Final = "compile_matrix"


class ReportKeeper:
    """Writes the report of one run."""

    def __init__(self, root: Path, report: Path, journal: Path, project: Path | None = None,
                 folder: str = FOLDER) -> None:
        """``root`` is pytest's root folder, ``project`` the one from which modules are imported (default: the same).

        ``folder``: the run's own, below the root: earlier reports, and the record of a part, lie in it.
        """
        self.root, self.project = root, project or root
        self.part_file = str(PurePosixPath(folder, PurePosixPath(PART_FILE).relative_to(FOLDER)))
        self.previous = root / folder / PurePosixPath(PREVIOUS).relative_to(FOLDER)
        self.report, self.journal = behind_link(report), behind_link(journal)
        self.message = ""
        """What became of an earlier report, in one sentence; empty if there is nothing to say."""
        self.saved: Path | None = None
        """The file that has the record of this run; None until it is written."""

    def begin(self, arguments: tuple[str, ...]) -> None:
        """Mark what an earlier run left, unless that was done already, and keep the journal of one that was killed."""
        mark = later_run_mark(arguments)
        # What ends a run later on, a kill too, must not leave a report that looks like its own.
        for path in (self.report, self.journal):
            if path.is_file():
                mark_earlier(path, mark)
        self._note_interrupted()
        if self.journal.is_file() and _is_only_record(self.journal):
            self._move(self.journal)

    def _note_interrupted(self) -> None:
        """Before the journal of a run that was killed goes, what it was to judge is noted in the report."""
        if not self.report.is_file() or not self.journal.is_file():
            return
        if names := planned_in(self.journal):
            mark_interrupted(self.report, names, start_told_by(self.journal))

    def save(self, content: dict[str, Any], indent: int | None = None, overtaken_by: str = "") -> None:
        """Write the content of the report file, as the table above says. Raises OSError.

        ``overtaken_by``: when a run began that began after this one, and whose report is to stay.
        """
        if overtaken_by and not self._give_way(content, overtaken_by, indent):
            return
        self._save_by_part(content, indent)

    def _give_way(self, content: dict[str, Any], later: str, indent: int | None) -> bool:
        """Whether this run may write its report, though a later one has begun: until that one has written its own."""
        kept = self._read_kept()
        # A report without the mark is one that the later run has written, for it had marked the one before.
        if kept is not None and LATER_RUN not in kept:
            self._write_part(content, indent)
            self.message = f"{self._report_name()} is left as a run wrote it that began after this one ({later}); " \
                           f"the record of this run is {self._part_name()}"
            return False
        self.message = f"{self._report_name()} is marked as of an earlier run, because another one began beside it " \
                       f"({later}); --compile-folder gives each run files of its own"
        content[LATER_RUN] = {"began": later, "command": "pytest ..."}
        return True

    def _save_by_part(self, content: dict[str, Any], indent: int | None) -> None:
        """Replace the report, take this part of the matrix over into it, or leave it as it is."""
        block = content[BLOCK]
        kept = self._read_kept()
        judged = judged_cells(block)
        nothing_judged = not judged and bool(block["cells"])
        if kept is None or (is_whole(block) and not nothing_judged):
            self._replace(content, kept, indent)
            return
        # A part has a record of its own whatever becomes of the report.
        self._write_part(content, indent)
        obstacle = not_mergeable(kept[BLOCK], block)
        if not nothing_judged and not obstacle:
            self._take_over(content, kept, len(judged), indent)
        # A whole report says more than a part of another matrix or shard.
        elif nothing_judged or (is_whole(kept[BLOCK]) and not judges_all_cells(block)):
            why = "nothing was judged" if nothing_judged else f"it {obstacle}"
            self.message = f"{self._report_name()} is left as an earlier run wrote it, because {why}; " \
                           f"the record of this run is {self._part_name()}"
        else:
            self._replace(content, kept, indent)

    def _take_over(self, content: dict[str, Any], kept: dict[str, Any], judged: int, indent: int | None) -> None:
        imported = (kept[BLOCK]["run"] or {}).get("sources", {})
        edited = bool(edited_since(self.project, imported))
        merged = _with_mark(take_over(kept, content, edited), kept)
        self._keep_previous(kept)
        self._write_report(merged, indent)
        cells, tests = _kept_names(merged[BLOCK])
        left = [count(len(cells), "cell")] * bool(cells) + [count(len(tests), "test")] * bool(tests)
        if left:
            self.message = f"{self._report_name()} has {count(judged, 'cell')} of this run, and verdicts of an " \
                           f"earlier run in {' and '.join(left)}; the record of this run alone is {self._part_name()}"

    def _replace(self, content: dict[str, Any], kept: dict[str, Any] | None, indent: int | None) -> None:
        self._keep_previous(kept)
        self._write_report(content, indent)

    def _write_report(self, content: dict[str, Any], indent: int | None) -> None:
        _write_sealed(self.report, content, indent)
        self.saved = self.report

    def _write_part(self, content: dict[str, Any], indent: int | None) -> None:
        self.saved = self.root / self.part_file
        _write_sealed(self.saved, content, indent)

    def _keep_previous(self, kept: dict[str, Any] | None) -> None:
        """Copy the report that is about to be replaced, unless it would displace one that says more."""
        if not self.report.is_file():
            return
        there = self.previous / self.report.name
        if kept is None or _is_of_one_run(kept) or not there.exists():
            self._move(self.report)

    def keep_before(self) -> None:
        """Keep the report that a run without a matrix is about to replace, if it is one of ours. Raises OSError."""
        if self.report.is_file() and f'"{BLOCK}"'.encode() in self.report.read_bytes():
            self._keep_previous(self._read_kept())

    def _move(self, path: Path) -> None:
        make_folder(self.previous)
        # Not Path.replace: a link may have led to another disk.
        shutil.move(path, self.previous / path.name)

    def _read_kept(self) -> dict[str, Any] | None:
        """What is in the report file, without its seal; None without a report that is as its run wrote it."""
        if not self.report.is_file():
            return None
        try:
            content = read_content(self.report)
        except ReportError:
            return None
        # Who writes it again gives it a seal of its own.
        content.pop(SEAL, None)
        return content

    def _report_name(self) -> str:
        return self._shown_path(self.report)

    def _part_name(self) -> str:
        return self._shown_path(self.root / self.part_file)

    def _shown_path(self, path: Path) -> str:
        """As the user finds it: from the project's folder on, whichever folder ``--compile-folder`` has named."""
        for folder in (self.project, Path.cwd()):
            if path.is_relative_to(folder):
                return str(path.relative_to(folder))
        return str(path)


def _with_mark(merged: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """The report with the mark that it had, while verdicts are kept that a killed run was to judge anew."""
    older = set().union(*_kept_names(merged[BLOCK]))
    left = [name for name in kept.get(INTERRUPTED, ()) if name in older]
    if not left or LATER_RUN not in kept:
        return merged
    # Of a report of an earlier version nobody knows which run was killed.
    killed = kept.get(INTERRUPTED_RUN, kept[LATER_RUN])
    return {**merged, INTERRUPTED: left, INTERRUPTED_RUN: killed, LATER_RUN: killed}


def _kept_names(block: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Cells and tests of which verdicts of an earlier run are kept."""
    cells = [cell["id"] for cell in block["cells"] if "kept" in cell]
    tests: list[str] = []
    for run in block.get("tests_kept", ()):
        tests += run["tests"]
    return cells, tests


def _write_sealed(path: Path, content: dict[str, Any], indent: int | None) -> None:
    replace_file(path, add_seal(dumps(content, indent)))


def _is_of_one_run(content: dict[str, Any]) -> bool:
    """Is it the report of a run of the whole matrix, with nothing of another run in it?"""
    block = content[BLOCK]
    cells_kept, _ = _kept_names(block)
    return bool(block["cells"]) and judges_all_cells(block) and not cells_kept


def _is_only_record(journal: Path) -> bool:
    """Has the journal verdicts and no end? Then its run was killed, and left nothing else."""
    lines = journal.read_bytes().rstrip().splitlines()
    return len(lines) > 1 and not lines[-1].startswith((b'{"kind": "end"', b'{"kind": "later_run"'))


def save_whole(config: Any) -> None:
    """Have pytest-json-report write its file at once: it writes it bit by bit, and a kill would leave a part of it."""
    plugin, indent = config._json_report, config.option.json_report_indent
    # Its report is complete only when it saves it.
    plugin.save_report = lambda path: _write_sealed(Path(path), plugin.report, indent)
