"""Journal: every verdict is kept where it arrives and written at once as a JSON line; the report is made from it.

A file that is only written at the end is lost with the process, so the journal is on disk while the run goes on. It
begins with the session: a run that is killed before its first verdict has left its plan, not the journal of an earlier
run (:mod:`.earlier`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

from pytest_torchcompile.oracle.pass_records import PassStep
from pytest_torchcompile.oracle.proof import compiled_code_ran
from pytest_torchcompile.plan.matrix import Matrix, PlannedCell
from pytest_torchcompile.report.costs import shared_graphs
from pytest_torchcompile.report.metrics import Sections
from pytest_torchcompile.report.provenance import Sources, fingerprint, run_provenance
from pytest_torchcompile.report.record import Record, utc_time
from pytest_torchcompile.report.safe_output import behind_link, make_folder
from pytest_torchcompile.report.schema import SCHEMA_VERSION
from pytest_torchcompile.report.strictjson import plain_json
from pytest_torchcompile.run.settings import Settings
from pytest_torchcompile.wrappers.wrapping import lane_of

__all__ = ["Journal", "Trouble"]


class Journal:
    """The verdicts of one run, in the process that sees them all."""

    def __init__(self, matrix: Matrix, planned: Sequence[PlannedCell], settings: Settings, path: Path) -> None:
        self.matrix, self.planned, self.settings, self.path = matrix, planned, settings, behind_link(path)
        self.exit_status: int | None = None
        self.workers = 1
        """Processes that run cells."""
        self.report = ""
        """The report file, from the folder of the journal."""
        self.overtaken_by = ""
        """When a run began that writes the same report, and began before this one ended; empty if none did."""
        self.started = utc_time()
        """When the run began, as reports write it."""
        self._known = {p.cell.id for p in planned}
        self.why_run: dict[str, str] = {}
        """Cell to why it was run or is not kept, in a run that reuses results."""
        self._expected: dict[str, list[str]] = {}
        self._expected_tests: list[str] = []
        self.trouble = Trouble()
        """What of the run's files could not be written; others than this one are noted here too."""
        self._sources = Sources()
        self._file: IO[str] | None = None
        # Set by the first write that fails: a full disk would else be told for each verdict.
        self._given_up = False

    @cached_property
    def record(self) -> Record:
        """What the run reported so far; made late, because workers and ``--collect-only`` never need it."""
        self._sources = Sources.take(self.matrix.root)
        return Record({
            "schema_version": SCHEMA_VERSION,
            "run": {**run_provenance(self.matrix.root), "started": self.started, "workers": self.workers},
            "matrix": {
                "path": self.settings.matrix,
                "sha256": self.matrix.sha256,
                "cells_planned": self.matrix.cell_ids,
                "checks": list(self.matrix.checks),
                "excluded": dict(Counter(e.reason for e in self.matrix.excluded)),
            },
            "shard": {"index": self.settings.shard[0], "of": self.settings.shard[1]},
            "cells": [_describe_planned(p, self.matrix) for p in self.planned],
        })

    # while the run goes on

    def begin(self) -> None:
        """Put the plan where the journal of the run before was, at once. A file that can't be written is given up."""
        if not self.trouble.try_writing(self.path, self._begin_file):
            self._give_up()

    def _begin_file(self) -> None:
        make_folder(self.path.parent)
        # What stands at our path is the later run's then, and must stay: the plan goes into our own, unnamed file.
        if self._file is not None and self._is_overtaken():
            self._file.seek(0)
            self._file.truncate()
            self._write_plan()
            return
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        if self._file is not None:
            self._file.close()
        # A new file in the place of the old one, which a run beside this one may have open and goes on writing to.
        try:
            self._file = beside.open("w", encoding="utf-8")
            self._write_plan()
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)

    def _write_plan(self) -> None:
        self._write({"kind": "plan", "head": self.record.head, "expected": self._expected,
                     "expected_tests": self._expected_tests, "report": self.report})

    def _is_overtaken(self) -> bool:
        """Has a run that began after this one put its journal in the place of ours?"""
        try:
            return self._file is not None and not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        # Somebody has removed it.
        except OSError:
            return False

    def expect_items(self, nodeids: Iterable[str]) -> None:
        """Take note of the items that this run will judge; each worker tells the same ones."""
        expected: dict[str, list[str]] = {}
        for nodeid in nodeids:
            cell, check = _split_nodeid(nodeid)
            if cell in self._known:
                expected.setdefault(cell, []).append(check)
        if expected != self._expected:
            self._expected = expected
            self._plan_again()

    def add_verdict(self, carried: dict[str, Any]) -> None:
        """Keep one verdict: ``cell``, ``check``, ``verdict``, ``problems``, and with the first its observation."""
        carried = plain_json(carried)
        if why_run := carried.pop("why_run", ""):
            self.why_run[carried["cell"]] = why_run
        if "observation" in carried:
            self._leave_out_known(carried["observation"])
        self._write_line({"kind": "verdict", **carried})
        self._current().add_verdict(carried)

    def expect_tests(self, nodeids: Iterable[str]) -> None:
        """Take note of tests of this run that use our fixtures."""
        new = [nodeid for nodeid in dict.fromkeys(nodeids) if nodeid not in self._expected_tests]
        if not new:
            return
        self._expected_tests = [*self._expected_tests, *new]
        if self._is_open():
            self._plan_again()
        # Under xdist a test is known when its worker begins it, and others are done by then.
        else:
            self._write_line({"kind": "tests_planned", "tests": new})

    def leave_out_tests(self, nodeids: Iterable[str]) -> None:
        """Take note of tests of this run that use our fixtures and were deselected."""
        self._current().leave_out_tests(list(nodeids))

    def add_test(self, test: dict[str, Any], environment: dict[str, Any], sources: dict[str, str]) -> None:
        """Keep what came of one test that uses our fixtures."""
        line = {"kind": "test", "test": test, "environment": environment, "sources": sources}
        self._leave_out_known(line)
        self._write_line(line)
        self._current().add_test(test, environment, sources)

    def add_lost_item(self, nodeid: str, text: str) -> None:
        """The pytest process that ran this item died, so nobody reported its verdict."""
        cell, check = _split_nodeid(nodeid)
        if cell in self._known:
            problem = {"message": "the pytest worker that ran this item died", "evidence": text,
                       "hint": "", "file": "", "line": 0}
            self.add_verdict({"cell": cell, "check": check, "verdict": "crash", "problems": [problem]})

    def finish(self, exit_status: int) -> None:
        """Close the journal."""
        self.exit_status = exit_status
        finished = utc_time()
        record = self._current()
        edited = self._sources.edited_files(record.sources or {})
        record.finish(exit_status, finished, edited)
        line = {"kind": "end", "exit_status": exit_status, "finished": finished, "not_run": self.not_run()}
        if edited:
            line["sources_edited"] = edited
        if record.tests_deselected:
            line["tests_deselected"] = record.tests_deselected
        self._write_line(line)
        if self._is_overtaken():
            self.overtaken_by = _start_of_run(self.path, self.report)
        if self._file is not None:
            self._file.close()
            self._file = None

    def take_back_end(self) -> None:
        """The report could not be written, so the run ends as a failure: its journal alone is not to pass the gate.

        The last line is cut off, which can be done on a full disk too.
        """
        if self.overtaken_by:
            return
        with suppress(OSError), self.path.open("r+b") as file:
            *lines, last = file.read().splitlines(keepends=True)
            if b'"kind": "end"' in last:
                file.truncate(sum(map(len, lines)))

    # what came of it

    def not_run(self) -> list[str]:
        """Items that were to be judged and have no verdict, as ``cell::check``."""
        return self._current().not_run()

    def usage_errors(self) -> list[str]:
        """Mistakes in the matrix that only a rank process could find."""
        messages: set[str] = set()
        for observation in self._current().observations.values():
            failure = observation.get("failure") or {}
            if failure.get("kind") == "usage":
                messages.add(failure["message"])
        return sorted(messages)

    def seconds(self) -> dict[str, float]:
        """Wall seconds of each cell that ran."""
        # Milliseconds: more digits are noise, and would change the file from run to run.
        return {cell: round(seconds, 3) for cell, seconds in self._current().seconds.items() if seconds}

    def graphs(self) -> dict[str, list[str]]:
        """Keys of the graphs that each cell shares with another one, as Inductor's cache knows them."""
        return shared_graphs(self._current().observations)

    def status(self, cell: str) -> str:
        """The cell's status: the worst of its verdicts; ``not_run`` counts too."""
        return self._current().status(cell)

    def reused(self) -> dict[str, dict[str, Any]]:
        """Cells whose result is of an earlier run, and what is told of that run."""
        return self._current().reused

    def leaks(self, cell: str) -> list[str]:
        """Torch state that the cell changed and left changed."""
        return list(self._current().observations.get(cell, {}).get("leaks", ()))

    def cut_short(self) -> dict[str, tuple[int, str]]:
        """Cells whose fuzzing was ended by its budget: the sequences compared until then, and what had run out."""
        cut_short: dict[str, tuple[int, str]] = {}
        for cell, observation in self._current().observations.items():
            section = observation["sections"].get("fuzz", {})
            if not section.get("rungs"):
                continue
            last_rung = section["rungs"][-1]
            # Of a search that has found something its finding is told.
            if last_rung["spent"] and not section["finding"]:
                cut_short[cell] = last_rung["examples"], last_rung["spent"]
        return cut_short

    def idle_passes(self) -> dict[tuple[str, str], int]:
        """Graph passes that changed no graph in any cell where they were judged, with how many cells these are.

        A key is the pass and a table of decompositions; no table where the pass is idle behind each. Behind one alone
        it is worth a line of its own: before Inductor few operators are left that the model was written with.
        """
        table_of = {planned.cell.id: str(planned.cell.toolkit["decompositions"]) for planned in self.planned}
        judged: Counter[tuple[str, str]] = Counter()
        useful: set[tuple[str, str]] = set()
        for cell, observation in self._current().observations.items():
            # A section that was ended early lacks keys.
            with suppress(KeyError, TypeError, ValueError):
                steps = [PassStep.from_dict(step) for step in observation["sections"]["passes"]["passes"]]
                judged.update({(step.pass_name, table_of[cell]) for step in steps if step.pass_name})
                useful |= {(step.pass_name, table_of[cell]) for step in steps if step.changed or step.raised}
        of_some_use = {name for name, _ in useful}
        idle: Counter[tuple[str, str]] = Counter()
        for (name, table), cells in judged.items():
            if (name, table) not in useful:
                idle[name, table if name in of_some_use else ""] += cells
        return dict(idle)

    def read_numbers(self, read: Callable[[Sections], float | None]) -> dict[str, float]:
        """A number of each cell that has it."""
        numbers: dict[str, float] = {}
        for cell, observation in self._current().observations.items():
            # A section that was ended early lacks keys.
            with suppress(KeyError, TypeError, ValueError):
                number = read(observation["sections"])
                if number is not None:
                    numbers[cell] = number
        return numbers

    def is_selected(self, cell: str) -> bool:
        """Whether this run was to judge the cell, not deselected by ``-k``, ``-m`` or a node id."""
        return cell in self._expected

    @property
    def sources_edited(self) -> list[str]:
        """Sources that were edited while the run went on; known when it has ended."""
        return self._current().sources_edited

    def compiled_cells(self) -> set[str]:
        """The cells that executed compiled code, here or in the run that their result is of."""
        observations = self._current().observations
        return {cell for cell, observation in observations.items() if compiled_code_ran(observation["sections"])}

    def block(self) -> dict[str, Any]:
        """The report's block ``compile_matrix``; the schema is in :mod:`.schema`."""
        return self._current().block()

    def _leave_out_known(self, line: dict[str, Any]) -> None:
        """Take out of a line the imported files that an earlier line has."""
        known = self._current().sources or {}
        if line.get("sources"):
            line["sources"] = {name: digest for name, digest in line["sources"].items() if known.get(name) != digest}

    def _plan_again(self) -> None:
        """Write the plan as it is known now, while nothing else stands in the journal."""
        if self._file is not None and self._is_open():
            self.begin()

    def _is_open(self) -> bool:
        """Does nothing stand in the journal yet, but the plan?"""
        record = self._current()
        return not record.verdicts and not record.tests

    def _current(self) -> Record:
        """The record, with what the run is to judge as far as that is known now."""
        self.record.expected = self._expected
        self.record.expected_tests = self._expected_tests
        return self.record

    def _write_line(self, content: dict[str, Any]) -> None:
        if self._file is None and not self._given_up:
            self.begin()
        if self._file is not None and not self.trouble.try_writing(self.path, partial(self._write, content)):
            self._give_up()

    def _give_up(self) -> None:
        """Write no more: what stands there has no end, so nobody takes it for a whole run."""
        file, self._file, self._given_up = self._file, None, True
        if file is not None:
            # What it holds back can't be written either.
            with suppress(OSError):
                file.close()

    def _write(self, content: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({**content, "sha256": fingerprint(content)}) + "\n")
            # The line has to be there even if the process is killed at once.
            self._file.flush()


def _start_of_run(journal: Path, report: str) -> str:
    """When the run began whose journal it is; empty if it writes another report."""
    try:
        with journal.open(encoding="utf-8") as file:
            plan = json.loads(file.readline())
        return str(plan["head"]["run"]["started"]) if plan["report"] == report else ""
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _describe_planned(planned: PlannedCell, matrix: Matrix) -> dict[str, Any]:
    """A cell, and what the matrix asks of it: enough to judge its observation again."""
    return {
        "id": planned.cell.id,
        "axes": planned.cell.axes,
        "lane": lane_of(planned.cell.wrapper),
        "planned": {
            "outcome": planned.outcome, "reason": planned.reason, "issue": planned.issue, "until": planned.until,
            "expected": list(planned.checks), "limits": planned.limits, "rule": planned.rule,
            "checks": matrix.checks_of(planned), "also": list(planned.also),
        },
    }


def _split_nodeid(nodeid: str) -> tuple[str, str]:
    """Cell and check of ``file::cell::check``; empty texts where a node id has fewer parts."""
    *_, cell, check = ["", "", *nodeid.split("::")]
    return cell, check


class Trouble:
    """The first file of the run that could not be written, and why. It is told once, and the run goes on.

    A disk that is full, or a ``.compile-matrix`` that is read-only, is no verdict on any cell. The verdicts are still
    shown, the run ends as one with a failure, and the gate finds no whole report of it.
    """

    def __init__(self) -> None:
        self.text = ""
        """One sentence; empty while there is no trouble."""

    def try_writing(self, file: object, write: Callable[[], object]) -> bool:
        """Whether ``write`` could write the file; an OSError is noted, and goes no further."""
        try:
            write()
        except OSError as error:
            self.text = self.text or f"{file} could not be written: {error}; the run went on, and ends as a failure"
            return False
        return True
