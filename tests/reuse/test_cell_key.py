"""The key of a cell: what is asked of it names its folder, and where it runs does not."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.reuse import cell_key
from pytest_torchcompile.reuse.cell_key import cell_folder, key_parts, machine_digests, start_names
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
    "comparisons": {"k1": []},
}


def test_each_field_of_a_job_is_asked_or_not():
    """A new field has to be put into one of the two lists."""
    assert {field.name for field in fields(Job)} == ASKED.keys() | NOT_ASKED.keys()


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_names_another_folder(name):
    """Each of these may change what comes of a cell."""
    assert cell_folder(replace(JOB, **{name: ASKED[name]})) != cell_folder(JOB)


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


def test_the_root_of_a_fuzzer_counts_for_nothing():
    """It is the folder of found sequences, and all else of its options counts."""
    searched = replace(JOB, fuzz={"examples": 5, "root": "/repo"})
    assert cell_folder(searched) == cell_folder(replace(JOB, fuzz={"examples": 5, "root": "/elsewhere"}))
    assert cell_folder(searched) != cell_folder(replace(JOB, fuzz={"examples": 6, "root": "/repo"}))


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


@pytest.fixture
def fresh_machine():
    """What was read of the machine is forgotten, before and after."""
    machine_digests.cache_clear()
    yield
    machine_digests.cache_clear()


@pytest.mark.usefixtures("fresh_machine")
def test_what_is_read_of_the_machine(monkeypatch, tmp_path):
    """A package more, another compiler, another driver: the part that holds it differs, and no other."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(cell_key, "_own_code", lambda: iter([("wrap.py", "1")]))
    files = {"/proc/cpuinfo": "model name\t: A\ncpu MHz\t\t: 1\n\nmodel name\t: B\n"}
    monkeypatch.setattr(cell_key, "_read", lambda path: files.get(path, ""))
    compiler = ["g++", "g++ 12"]
    monkeypatch.setattr(cell_key, "_compiler", lambda: compiler)

    def read():
        machine_digests.cache_clear()
        return machine_digests()

    first = read()

    def changed():
        now = read()
        return [name for name in now if now[name] != first[name]]

    # The clock rate, and what comes behind the first processor, are no difference.
    files["/proc/cpuinfo"] = "model name\t: A\ncpu MHz\t\t: 2\n\nmodel name\t: C\n"
    assert changed() == []
    files["/proc/cpuinfo"] = "model name\t: B\n"
    assert changed() == ["the machine"]
    files["/proc/cpuinfo"] = "model name\t: A\ncpu MHz\t\t: 1\n\n"
    files["/proc/driver/nvidia/version"] = "580"
    assert changed() == ["the machine"]
    del files["/proc/driver/nvidia/version"]
    compiler[1] = "g++ 13"
    assert changed() == ["the C++ compiler"]
    compiler[1] = "g++ 12"
    (tmp_path / "numpy-2.dist-info").mkdir()
    (tmp_path / "numpy-2.dist-info" / "RECORD").write_text("numpy/core.py,sha256=1,5\n")
    assert changed() == ["the installed packages"]
