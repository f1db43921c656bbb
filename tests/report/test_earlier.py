"""The mark on what an earlier run left: which files, when, and what it says."""

from __future__ import annotations

import json

import pytest
from runs import Run

from pytest_torchcompile.report.earlier import later_run_mark, left_by_earlier_runs, mark_earlier
from pytest_torchcompile.report.provenance import add_seal
from pytest_torchcompile.report.reading import read_report

MARK = {"began": "2026-11-22T10:00:00+00:00", "command": "pytest --compile-matrix"}


@pytest.fixture
def folder(tmp_path):
    """Every file that a run may leave."""
    for name in ("report.json", "journal.jsonl", "rank1/report.json", "rank1/journal.jsonl"):
        path = tmp_path / ".compile-matrix" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in (".report.json", "named.json"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(("arguments", "names"), [
    (["--compile-matrix"], ["report.json", "journal.jsonl"]),
    (["--compile-matrix=m.yaml", "-k", "x", "--unknown"], ["report.json", "journal.jsonl"]),
    (["--compile-matrix", "--json-report-file=named.json"], ["named.json", "report.json", "journal.jsonl"]),
    (["--compile-matrix", "--json-report-file", "named.json"], ["named.json", "report.json", "journal.jsonl"]),
    (["--compile-matrix", "--json-report-file"], ["report.json", "journal.jsonl"]),
    (["--json-report", "tests"], [".report.json"]),
    (["tests", "--compile-matrices"], []),
    (["--compile-matrix", "--compile-folder=.compile-matrix/none", "--unknown"], []),
    (["--compile-matrix", "--compile-folder", "none"], []),
    (["--compile-matrix", "--co"], []),
    (["--compile-matrix", "-k", "--co", "--bogus"], ["report.json", "journal.jsonl"]),
    (["--compile-matrix", "--", "--co"], ["report.json", "journal.jsonl"]),
    (["--compile-matrix", "-k", "x", "--co"], []),
    (["--compile-matrix", "--help"], []),
], ids=" ".join)
def test_which_files(folder, monkeypatch, arguments, names):
    for variable in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert [path.name for path in left_by_earlier_runs(folder, folder, arguments)] == names


@pytest.mark.parametrize("arguments", [
    ["--compile-model=models:Net"], ["--compile-matrix=model:models:Net", "-k", "eager"],
    ["--compile-matrix", "model:models:Net"],
], ids=" ".join)
def test_a_run_of_one_model_marks_its_own_files_alone(folder, monkeypatch, arguments):
    """The matrix's report is none that such a run could replace."""
    for variable in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert left_by_earlier_runs(folder, folder, arguments) == []
    own = folder / ".compile-matrix/model/report.json"
    own.parent.mkdir()
    own.touch()
    assert left_by_earlier_runs(folder, folder, arguments) == [own]


def test_a_rank_after_the_first_has_files_of_its_own(folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("RANK", "1")
    found = left_by_earlier_runs(folder, folder, ["--compile-matrix"])
    assert [path.parent.name for path in found] == ["rank1", "rank1"]


def test_the_mark_holds_our_options_and_nothing_else():
    """A report holds no secrets, and a command line may."""
    arguments = ["--token=secret", "-k", "x", "--compile-matrix", "m.yaml", "--compile-shard=9/8", "--password", "pw"]
    assert later_run_mark(arguments)["command"] == "pytest ... --compile-matrix m.yaml --compile-shard=9/8 ..."


@pytest.mark.parametrize("whole", [True, False], ids=["sealed", "not sealed"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_marked_report_is_the_same_report(tmp_path, whole, indent):
    """Its seal still holds, if it did; of two marks the later one is there, alone."""
    path = tmp_path / "report.json"
    text = json.dumps({"compile_matrix": Run().blocks()[0]}, indent=indent)
    path.write_text(add_seal(text) if whole else text)
    before = read_report(path)
    mark_earlier(path, MARK)
    after = read_report(path)
    assert after.block == before.block
    assert (after.sealed, after.seal_broken) == (whole, False)
    assert after.later_run == "`pytest --compile-matrix` of 2026-11-22T10:00:00+00:00"
    marked = path.read_bytes()
    mark_earlier(path, MARK | {"command": "pytest again"})
    again = read_report(path)
    assert again.later_run == "`pytest again` of 2026-11-22T10:00:00+00:00"
    assert again.block == before.block
    assert (again.sealed, again.seal_broken) == (whole, False)
    assert path.read_bytes().count(b"compile_matrix_later_run") == 1
    mark_earlier(path, MARK)
    assert path.read_bytes() == marked


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"tests": []}', b'[1, 2]'], ids=repr)
def test_what_is_no_report_of_ours_stays_as_it_is(tmp_path, data):
    path = tmp_path / "report.json"
    path.write_bytes(data)
    mark_earlier(path, MARK)
    assert path.read_bytes() == data


def test_a_wrong_seal_stays_wrong(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(add_seal(json.dumps({"compile_matrix": Run().blocks()[0]})).replace("net", "NET", 1))
    mark_earlier(path, MARK)
    assert b"compile_matrix_later_run" in path.read_bytes()
    assert b"compile_matrix_seal" in path.read_bytes()
