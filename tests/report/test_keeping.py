"""The report file: two runs at once, links, and what a run without a matrix finds there."""

from __future__ import annotations

import json
import os

import pytest
from runs import Run

from pytest_torchcompile.cli import main
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.report.earlier import later_run_mark, mark_earlier
from pytest_torchcompile.report.journal import Journal
from pytest_torchcompile.report.keeping import ReportKeeper
from pytest_torchcompile.report.provenance import add_seal, head_fingerprint
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.run.settings import Settings

MATRIX = """
version: 1
axes: {backend: [eager]}
models: {net: {factory: "kept_models:net", inputs: "kept_models:batch", dims: {B: 4}}}
"""


class Beside:
    """One of several runs in one folder, without pytest: its journal and its report."""

    def __init__(self, folder, started, report=".compile-matrix/report.json"):
        self.folder = folder
        (folder / "kept_models.py").write_text("def net(): pass\ndef batch(B): pass\n")
        (folder / "m.yaml").write_text(MATRIX)
        settings = Settings("m.yaml", (), (1, 1), 300.0, "rank", False)
        self.journal = Journal(load_matrix(folder / "m.yaml"), (), settings, folder / ".compile-matrix/journal.jsonl")
        self.journal.started = started
        self.keeper = ReportKeeper(folder, folder / report, self.journal.path)
        self.journal.report = os.path.relpath(self.keeper.report, self.journal.path.parent)
        self.keeper.begin(("--compile-matrix",))
        self.journal.begin()

    def end(self):
        """End with a report in which all is well."""
        run = Run()
        run.sources = {"kept_models.py": "0" * 64}
        (block,) = run.blocks()
        self.journal.finish(0)
        self.keeper.save({"compile_matrix": block, "whose": self.journal.started}, None, self.journal.overtaken_by)
        return self.keeper.message


def whose(folder, name=".compile-matrix/report.json"):
    return json.loads((folder / name).read_text())["whose"]


def test_of_two_runs_at_once_the_later_one_has_the_report(tmp_path):
    """It has ended first: the older one leaves its report, and says where its own is."""
    older, later = Beside(tmp_path, "10:00"), Beside(tmp_path, "10:01")
    assert later.end() == ""
    assert older.end() == (".compile-matrix/report.json is left as a run wrote it that began after this one (10:01); "
                           "the record of this run is .compile-matrix/part/report.json")
    assert whose(tmp_path) == "10:01"
    assert whose(tmp_path, ".compile-matrix/part/report.json") == "10:00"
    assert main(["gate", str(tmp_path / ".compile-matrix/report.json")]) == 0


@pytest.mark.parametrize("before", [True, False])
def test_the_older_run_ends_while_the_later_one_goes_on(tmp_path, before):
    """Its report is marked until the later one has its own: that may be killed."""
    if before:
        Beside(tmp_path, "09:00").end()
    older, later = Beside(tmp_path, "10:00"), Beside(tmp_path, "10:01")
    assert older.end() == (".compile-matrix/report.json is marked as of an earlier run, because another one began "
                           "beside it (10:01); --compile-folder gives each run files of its own")
    report = tmp_path / ".compile-matrix/report.json"
    assert whose(tmp_path) == "10:00"
    assert main(["gate", str(report)]) == 2
    assert later.end() == ""
    assert whose(tmp_path) == "10:01"
    assert main(["gate", str(report)]) == 0


def test_a_later_plan_of_the_older_run_leaves_the_later_journal(tmp_path):
    """Under xdist a run writes its plan again when its workers have collected."""
    older, later = Beside(tmp_path, "10:00"), Beside(tmp_path, "10:01")
    older.journal.expect_tests(["t.py::a"])
    plan = json.loads((tmp_path / ".compile-matrix/journal.jsonl").read_text().splitlines()[0])
    assert plan["head"]["run"]["started"] == "10:01"
    later.end()
    older.end()
    assert whose(tmp_path) == "10:01"


def test_runs_with_reports_of_their_own_leave_each_other_alone(tmp_path):
    older, later = Beside(tmp_path, "10:00", "a.json"), Beside(tmp_path, "10:01", "b.json")
    assert (later.end(), older.end()) == ("", "")
    assert (whose(tmp_path, "a.json"), whose(tmp_path, "b.json")) == ("10:00", "10:01")
    assert main(["gate", str(tmp_path / "a.json")]) == 0


def test_files_in_a_folder_of_their_own(tmp_path):
    """With --compile-folder messages name the files where they are, from the project's folder on."""
    files = tmp_path / "runs" / "first"
    ours = files / ".compile-matrix"
    keeper = ReportKeeper(files, ours / "report.json", ours / "journal.jsonl", tmp_path)
    (block,) = Run().blocks()
    keeper.save({"compile_matrix": block})
    keeper.save({"compile_matrix": block}, None, "10:01")
    assert keeper.message == (
        "runs/first/.compile-matrix/report.json is left as a run wrote it that began after this one (10:01); the "
        "record of this run is runs/first/.compile-matrix/part/report.json")


def test_a_report_behind_a_link(tmp_path):
    """The link stays one, and what it leads to is marked, replaced and kept as any other report."""
    target = tmp_path / "elsewhere" / "report.json"
    target.parent.mkdir()
    link = tmp_path / ".compile-matrix" / "report.json"
    link.parent.mkdir()
    link.symlink_to(target)
    Beside(tmp_path, "09:00").end()
    assert link.is_symlink()
    assert main(["gate", str(target)]) == 0
    mark_earlier(link, later_run_mark(()))
    assert link.is_symlink()
    assert main(["gate", str(target)]) == 2
    Beside(tmp_path, "10:00").end()
    assert (whose(tmp_path), whose(tmp_path, ".compile-matrix/previous/report.json")) == ("10:00", "09:00")
    assert link.is_symlink()


def test_a_file_that_there_was_no_room_to_mark(tmp_path, monkeypatch, capsys):
    """It gets a name that says the same, whoever names it."""
    path = tmp_path / "report.json"
    path.write_text(add_seal(json.dumps({"compile_matrix": Run().blocks()[0]})))

    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pytest_torchcompile.report.earlier.replace_file", no_room)
    mark_earlier(path, later_run_mark(()))
    assert not path.exists()
    renamed = tmp_path / "earlier.report"
    assert read_report(renamed).later_run == "a run that could not mark this file"
    assert main(["gate", str(renamed)]) == 2
    assert main(["gate", str(renamed), "--earlier"]) == 0


@pytest.mark.parametrize("there", ["cells", "tests", "other", "none"])
def test_what_a_run_without_a_matrix_keeps(tmp_path, there):
    """A report that holds cells goes to `previous`, and no report of tests alone displaces it there."""
    path, previous = tmp_path / "report.json", tmp_path / ".compile-matrix/previous/report.json"
    block = Run().blocks()[0]
    if there == "tests":
        previous.parent.mkdir(parents=True)
        previous.write_text("the cells of before")
        block |= {"cells": [], "matrix": {**block["matrix"], "cells_planned": [], "checks": []}}
        block["head_sha256"] = head_fingerprint(block)
    content = {"compile_matrix": block} if there != "other" else {"tests": []}
    if there != "none":
        path.write_text(add_seal(json.dumps(content)))
    ReportKeeper(tmp_path, path, path).keep_before()
    if there == "tests":
        assert previous.read_text() == "the cells of before"
    else:
        assert previous.exists() == (there == "cells")
