"""A full disk or a folder that can't be written costs a warning: the run goes on, exit code and gate tell it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_torch
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager, "models:fails"]
checks: [compiles]
"""
MODELS = """
def fails(graph, inputs):
    if os.path.exists("fail"):
        raise RuntimeError("as wanted")
    return graph.forward
"""


def run(repo, *args, most=None):
    """Run the matrix where no file may have more than so many bytes, as on a disk that is full."""
    def limit():
        if most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    # -s: pytest itself captures in files.
    command = [sys.executable, "-m", "pytest", "--compile-matrix", "-s", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=repo.path, capture_output=True, text=True, preexec_fn=limit, check=False)


def gate(repo):
    """The gate's exit code for the report, and for the journal."""
    command = [sys.executable, "-m", "pytest_torchcompile", "gate"]
    return [subprocess.run([*command, f".compile-matrix/{name}"], cwd=repo.path, capture_output=True,
                           check=False).returncode for name in ("report.json", "journal.jsonl")]


def told_once(done):
    """One warning with the reason, all verdicts, and the exit code of a failure."""
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "INTERNALERROR" not in text
    assert "Traceback" not in text
    assert text.count("could not be written: ") == 1, text
    assert "; the run went on, and ends as a failure" in text
    assert "2 cells: " in text


@pytest.fixture
def green(repo):
    """A repository whose last run was green."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    assert run(repo).returncode == 0
    assert gate(repo) == [0, 0]
    return repo


@pytest.mark.parametrize(("most", "plugin"), [
    pytest.param(200, (), marks=pytest.mark.slow), (2500, ("-p", "no:pytest_jsonreport")),
], ids=["json-report", "alone"])
def test_a_full_disk(green, most, plugin):
    """From the start, or in the middle of the journal; the old green report is judged by no gate."""
    done = run(green, *plugin, most=most)
    told_once(done)
    assert "2 pass" in done.stdout
    assert gate(green) == [2, 2]


@pytest.mark.parametrize("plugin", [(), ("-p", "no:pytest_jsonreport")], ids=["json-report", "alone"])
def test_room_for_the_journal_alone(repo, plugin):
    """Every verdict is in it, and the run is a failure: the gate does not pass the journal instead."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    (repo.path / ".compile-matrix" / "report.json").mkdir(parents=True)
    told_once(run(repo, *plugin))
    (repo.path / ".compile-matrix" / "report.json").rmdir()
    assert gate(repo) == [2, 2]


def test_a_full_disk_where_a_cell_fails(green):
    """Its repro file can't be written either, which is no second warning and changes no verdict."""
    (green.path / "fail").touch()
    done = run(green, most=200)
    told_once(done)
    assert "1 pass, 1 fail" in done.stdout
    assert "  alone  " not in done.stdout


@pytest.mark.parametrize("plugin", [(), ("-p", "no:pytest_jsonreport")], ids=["json-report", "alone"])
def test_a_file_in_place_of_the_folder(repo, plugin):
    """As good as read-only."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    (repo.path / ".compile-matrix").write_text("mine")
    told_once(run(repo, *plugin))
    assert (repo.path / ".compile-matrix").read_text() == "mine"
    assert gate(repo) == [2, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(green):
    """The old report can't be marked, so the exit code alone tells it."""
    (green.path / ".compile-matrix").chmod(0o555)
    try:
        told_once(run(green))
    finally:
        (green.path / ".compile-matrix").chmod(0o755)
