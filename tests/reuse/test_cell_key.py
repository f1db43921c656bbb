"""The key of a cell: what is asked of it names its folder, and where it runs does not."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest

import pytest_torchcompile
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.reuse import cell_key
from pytest_torchcompile.reuse.cell_key import asked_of, cell_folder, folder_prefix, key_marks, key_parts, start_names
from pytest_torchcompile.reuse.definitions import SourceUse

ENTRY = ModelEntry("net", "models:net", "models:batch", where="matrix/a.yaml:3:5",
                   arguments={"factory": {"width": 8}, "inputs": {"kind": "token_ids"}})
JOB = Job(Cell(model="net", user=(("activation", "GELU"),)).to_dict(), ENTRY.to_dict(), "/repo", ("compiles",))
ASKED = {
    "cell": Cell(model="net", backend="eager").to_dict(),
    "entry": replace(ENTRY, factory="models:other").to_dict(),
    "checks": ("compiles", "equivalence"),
    "limits": {"graph_breaks": 1.0},
    "modules": ("models",),
    "seed": 1,
    "fuzz": {"examples": 5},
    "threads": 2,
    "autotune_choices": 3,
}
NOT_ASKED = {
    "logs": ("recompiles",),
    "log_folder": "/logs",
    "root": "/elsewhere/repo",
    "locate": 9.0,
    "culprit": 120.0,
    "compile_threads": 4,
    "rank": 1,
    "world": 2,
    "rendezvous": "/tmp/meeting",
    "local_rank": 1,
    "timeout": 5.0,
    "watched": True,
    "warm_toolchain": True,
    "comparisons": {"k1": []},
}
WORDS = {
    "entry": "the model's entry in the matrix",
    "modules": "the modules that the matrix names",
    "fuzz": "the options of the fuzzer",
    "autotune_choices": "autotuning choices",
}


def test_each_field_of_a_job_is_asked_or_not():
    """A new field has to be put into one of the two lists."""
    assert {field.name for field in fields(Job)} == ASKED.keys() | NOT_ASKED.keys()


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_names_another_folder(name):
    """Each of these may change what comes of a cell, and is told by its own word."""
    job = replace(JOB, checks=("compiles", "fuzz"))
    other = replace(job, **{name: ASKED[name]})
    assert cell_folder(other) != cell_folder(job)
    # Another cell has folders of its own altogether.
    assert other.cell != job.cell or cell_folder(other).startswith(folder_prefix(job))
    word = WORDS.get(name, name)
    assert word in [word for word, digest in asked_of(job).items() if asked_of(other)[word] != digest]


@pytest.mark.parametrize("name", NOT_ASKED)
def test_where_it_runs_names_the_same_folder(name):
    """Results of one machine's run are found by another's with more threads, in another clone."""
    assert cell_folder(replace(JOB, **{name: NOT_ASKED[name]})) == cell_folder(JOB)


@pytest.mark.parametrize(("where", "same"), [
    ("matrix/a.yaml:30:1", True),
    ("/repo/matrix/a.yaml:3:5", True),
    ("matrix/b.yaml:3:5", False),
    ("/other/matrix/a.yaml:3:5", False),
], ids=["another line", "by its whole path", "another file", "of another repository"])
def test_the_matrix_counts_by_its_file(where, same):
    """Not by the line, which any edit above moves."""
    moved = replace(JOB, entry=replace(ENTRY, where=where).to_dict())
    assert (cell_folder(moved) == cell_folder(JOB)) is same


@pytest.mark.parametrize("check", ["fuzz", "contract"])
def test_the_root_of_a_fuzzer_counts_for_nothing(check):
    """It is the folder of found sequences, and all else of its options counts, where a check draws by them."""
    searched = replace(JOB, fuzz={"examples": 5, "root": "/repo"}, checks=("compiles", check))
    assert cell_folder(searched) == cell_folder(replace(searched, fuzz={"examples": 5, "root": "/elsewhere"}))
    other = replace(searched, fuzz={"examples": 6, "root": "/repo"})
    assert cell_folder(searched) != cell_folder(other)
    without = ("compiles", "equivalence")
    assert cell_folder(replace(searched, checks=without)) == cell_folder(replace(other, checks=without))


def test_which_checks_draw_by_the_fuzzers_options():
    """A check that reads them has to be named in the key; nothing else reads them where a cell is run."""
    package = Path(pytest_torchcompile.__file__).parent
    reading = set()
    for file in package.rglob("*.py"):
        if "job.fuzz" in ast.unparse(ast.parse(file.read_text())):
            reading.add(file.relative_to(package).as_posix())
    assert reading - {"reuse/cell_key.py"} == {f"checks/{name}.py" for name in cell_key._DRAWING}


def test_names_that_lead_to_the_projects_code():
    """Functions, values of axes, and what the matrix hands to the factories: a registry may know a class by any."""
    names = start_names(JOB)
    assert {"models", "net", "batch", "width", "kind", "token_ids", "activation", "GELU", "inductor"} <= names
    # A number is a word of no code.
    assert "8" not in names


def test_parts_that_differ(monkeypatch):
    """Each is told by its own words, and only that one."""
    monkeypatch.setattr(cell_key, "machine_digests", lambda: {"the machine": "a"})
    monkeypatch.chdir("/")
    job = replace(JOB, root="/")
    use = SourceUse("code", frozenset({"forward"}))
    parts = key_parts(job, use, {"A": "1"})
    assert parts.keys() == {"the machine", "the working folder", "the environment variables", "the code of its model"}

    def changed(other):
        return [name for name in parts if parts[name] != other[name]]

    assert changed(key_parts(job, replace(use, digest="other"), {"A": "1"})) == ["the code of its model"]
    assert changed(key_parts(job, use, {"A": "2"})) == ["the environment variables"]
    assert changed(key_parts(replace(job, root="/usr"), use, {"A": "1"})) == ["the working folder"]
    # A variable of the terminal counts where the code of the model names it.
    names_term = replace(use, identifiers=frozenset({"forward", "TERM"}))
    assert changed(key_parts(job, names_term, {"A": "1", "TERM": "xterm"})) == ["the environment variables"]
    assert changed(key_parts(job, use, {"A": "1", "TERM": "xterm"})) == []


def test_marks_name_what_differs(monkeypatch):
    """Each fact of a part has one, and none of them is a value."""
    monkeypatch.setattr(cell_key, "machine_facts", lambda: {"the machine": {"cores": "4"}})
    use = SourceUse("code", modules={"models": "a", "layers": "b"})
    marks = key_marks(use, {"A": "secret"})
    assert marks.keys() == {"the machine", "the environment variables", "the code of its model"}
    assert marks["the machine"].keys() == {"cores"}
    assert marks["the code of its model"].keys() == {"models", "layers"}
    assert {len(mark) for each in marks.values() for mark in each.values()} == {4}
    other = key_marks(replace(use, modules={"models": "a", "layers": "c"}), {"A": "secret"})
    assert other["the code of its model"]["models"] == marks["the code of its model"]["models"]
    assert other["the code of its model"]["layers"] != marks["the code of its model"]["layers"]
