"""A result of an earlier run: found while nothing has changed, and else the reason why not."""

from __future__ import annotations

import importlib
import os
import time
import zlib
from dataclasses import replace

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.reuse import cell_reuse, run_inputs
from pytest_torchcompile.reuse.cell_reuse import CellReuse, EarlierResult
from pytest_torchcompile.reuse.run_inputs import RunInputs
from pytest_torchcompile.run.imported import hash_of

MODEL = "SCALE = 2\n\ndef net():\n    return SCALE\n\ndef batch():\n    return 1\n\ndef unused():\n    return 3\n"
PLANNED = PlannedCell(Cell(model="net"))
PARTS = {"the machine": "a"}


class Project:
    """A repository with one module and one data file, and the runs that are made in it."""

    def __init__(self, root):
        self.root = root
        self.model, self.data = root / "models.py", root / "scale.json"
        self.model.write_text(MODEL)
        self.data.write_text("2")
        entry = ModelEntry("net", "models:net", "models:batch", where="a.yaml:1:1")
        self.job = Job(PLANNED.cell.to_dict(), entry.to_dict(), str(root), ("compiles",))
        inputs = RunInputs(modules={"models": "models.py"}, names=["models"],
                           files={"scale.json": hash_of(self.data)})
        self.read = [inputs.to_dict()]
        self.observation = Observation("net", {"compiles": {"graphs": []}}, sources={"models.py": hash_of(self.model)})

    def reuse(self, run="first"):
        """What a run of pytest makes of it."""
        run_inputs._importable_names.cache_clear()
        importlib.invalidate_caches()
        return CellReuse(self.root / "kept", lambda: {"run": run, "commit": "abc", "changed": False})

    def keep(self, planned=PLANNED):
        return self.reuse().keep(planned, self.job, self.observation, 1.5, self.read)

    def look_up(self):
        return self.reuse("second").look_up(PLANNED, self.job)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Where the machine is always the same."""
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_digests", PARTS.copy)
    return Project(tmp_path)


def test_a_result_is_found_again(project):
    """With the run that it is of, and the files as they are now."""
    assert project.look_up() == f"nothing was kept in {project.root / 'kept'} before this run"
    assert project.keep() == ""
    found = project.look_up()
    assert isinstance(found, EarlierResult)
    assert found.seconds == 1.5
    assert found.observation == project.observation
    assert found.origin["run"] == "first"
    assert found.origin["commit"] == "abc"
    assert found.origin["age"] >= 0


def test_a_comment_changes_nothing_but_the_files_hash(project):
    """The report tells the file on which the verdict rests as it is now."""
    project.keep()
    project.model.write_text(MODEL + "# a comment\n")
    found = project.look_up()
    assert isinstance(found, EarlierResult)
    assert found.observation.sources == {"models.py": hash_of(project.model)}


@pytest.mark.parametrize(("change", "text"), [
    (lambda project: project.model.write_text(MODEL.replace("= 2", "= 3")), "the code of its model changed (models)"),
    (lambda project: project.model.write_text("def net(:\n"), "the code of its model can't be read: "),
    (lambda project: project.data.write_text("3"), "scale.json changed"),
    (lambda project: project.data.unlink(), "scale.json changed"),
    (lambda project: project.model.unlink(), "the module models is not found in models.py any more"),
], ids=["an edit", "an unfinished edit", "other data", "no data", "no module"])
def test_what_has_changed_is_said(project, change, text):
    """And the cell is run."""
    project.keep()
    change(project)
    found = project.look_up()
    assert isinstance(found, str)
    assert found.startswith(text)


def test_another_machine(project, monkeypatch):
    """Also one of which less is known."""
    project.keep()
    monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_digests", lambda: {"the machine": "b"})
    assert project.look_up() == "the machine changed"
    monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_digests", dict)
    assert project.look_up() == "the machine changed"


@pytest.mark.parametrize(("then", "now", "text"), [
    ({}, {"MY_FLAG": "1"}, "(MY_FLAG is new)"),
    ({"MY_FLAG": "1"}, {}, "(MY_FLAG is gone)"),
    ({"MY_FLAG": "1", "B": "2"}, {"MY_FLAG": "2", "B": "2"}, "(MY_FLAG)"),
    ({}, {"A": "1", "B": "1", "C": "1", "D": "1", "E": "1"}, "(A is new, B is new, C is new, 2 more)"),
], ids=["new", "gone", "other", "many"])
def test_the_variable_that_changed_is_named(project, monkeypatch, then, now, text):
    """Of many the first few."""
    monkeypatch.setattr("os.environ", then)
    project.keep()
    monkeypatch.setattr("os.environ", now)
    assert project.look_up() == f"the environment variables changed {text}"


def test_a_fact_of_the_machine_that_changed_is_named(project, monkeypatch):
    """Such as the package; where it is not known any more which, the part is told alone."""
    def installed(**packages):
        monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_digests", lambda: {"packages": str(packages)})
        monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_facts", lambda: {"packages": packages})

    installed(numpy="1", torch="2")
    project.keep()
    installed(numpy="1", torch="3", tiny="1")
    assert project.look_up() == "packages changed (tiny is new, torch)"
    for file in (project.root / "kept" / "lists").glob("*"):
        if b"numpy" in zlib.decompress(file.read_bytes().partition(b"\n")[2]):
            file.unlink()
    assert project.look_up() == "packages changed"


def test_another_cell_has_results_of_its_own(project):
    """By what is asked of it."""
    project.keep()
    job = project.job
    project.job = replace(job, seed=1)
    assert project.look_up() == "what is asked of it changed (seed)"
    project.job = replace(job, seed=1, limits={"graph_breaks": 1.0}, checks=("compiles", "equivalence"))
    assert project.look_up() == "what is asked of it changed (checks, limits, seed)"
    project.keep()
    project.job = replace(job, limits={"graph_breaks": 2.0}, checks=("compiles", "equivalence"), seed=1)
    # That of the last run is told.
    assert project.look_up() == "what is asked of it changed (limits)"
    project.job = replace(job, cell=Cell(model="net", backend="eager").to_dict())
    assert project.look_up() == "no result is kept"


def test_variables_that_change_while_pytest_runs(project, monkeypatch):
    """Rank processes have those of its start, so nothing is looked up and nothing kept."""
    monkeypatch.delenv("MY_SWITCH", raising=False)
    reuse = project.reuse()
    monkeypatch.setenv("MY_SWITCH", "1")
    why = "the environment variables changed while pytest ran (MY_SWITCH is new)"
    assert reuse.look_up(PLANNED, project.job) == why
    assert reuse.keep(PLANNED, project.job, project.observation, 1.0, project.read) == why
    assert project.look_up().startswith("nothing was kept in ")


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda project: project.observation.sections.update(numerics={"kind": "nondeterministic"}),
     "a model whose runs differ is always run"),
    (lambda project: project.model.write_text(MODEL + "x = 1\n"), "its code was edited while it ran"),
    (lambda project: project.read[0].update(untraceable=["models.py starts a process"]), "models.py starts a process"),
    (lambda project: project.read.append({**project.read[0], "files": {"scale.json": "another"}}),
     "the ranks have read different contents of one file"),
    (lambda project: project.read[0]["modules"].update(gone="gone.py"),
     "the code of its model can't be read: "),
], ids=["it wavers", "edited", "not to be followed", "ranks that differ", "a module is gone"])
def test_what_is_not_kept(project, spoil, why):
    """With the reason; a later run finds nothing."""
    spoil(project)
    assert project.keep().startswith(why)
    assert project.look_up().startswith("nothing was kept in ")


def test_expected_failures_are_never_kept(project):
    """They prove that something is still broken."""
    expected = replace(PLANNED, outcome="xfail")
    assert project.keep(expected) == "a cell with a rule `xfail` always runs"
    project.keep()
    assert project.reuse().look_up(expected, project.job) == "a cell with a rule `xfail` always runs"


def test_a_folder_that_can_not_be_written_is_said(project):
    """The verdict stands all the same."""
    (project.root / "kept").write_text("a file in its place")
    assert project.keep() == f"{project.root / 'kept'} can't be written"


def test_an_entry_of_another_version(project, monkeypatch):
    """It is not read, whatever it holds."""
    project.keep()
    monkeypatch.setattr(cell_reuse, "VERSION", cell_reuse.VERSION + 1)
    assert project.look_up() == "the kept result is of another version"


@pytest.mark.parametrize(("entry", "why"), [
    ({}, "no result is kept"),
    ({"asked": 3}, "no result is kept"),
    ({"version": cell_reuse.VERSION}, "no result is kept"),
    ({"version": cell_reuse.VERSION, "shared": 5}, "a part of the kept result is gone"),
], ids=["empty", "a number", "a key too few", "another type"])
def test_an_entry_that_somebody_has_written_by_hand(project, entry, why):
    """It is passed over, and the next one serves."""
    reuse = project.reuse()
    folder = cell_reuse.cell_folder(project.job)
    assert reuse.store.keep(folder, entry)
    assert project.look_up() == why
    project.keep()
    assert isinstance(project.look_up(), EarlierResult)


def test_of_several_results_the_newest_says_what_changed(project, monkeypatch):
    """What has just been edited, and not that an older one was of another machine too."""
    project.keep()
    folder = cell_reuse.cell_folder(project.job)
    (old,) = (project.root / "kept" / folder).glob("*.entry")
    an_hour_ago = time.time() - 3600
    os.utime(old, (an_hour_ago, an_hour_ago))
    monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_digests", lambda: {"the machine": "b"})
    assert project.look_up() == "the machine changed"
    project.keep()
    project.model.write_text(MODEL.replace("SCALE = 2", "SCALE = 4"))
    assert project.look_up() == "the code of its model changed (models)"
    # What was kept first serves again on its own machine.
    project.model.write_text(MODEL)
    monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_digests", PARTS.copy)
    assert isinstance(project.look_up(), EarlierResult)


def test_the_reason_is_that_of_the_newest_result(project, monkeypatch):
    """An older one, of another version, has a reason of its own, which is looked at later and told by nobody."""
    with monkeypatch.context() as patch:
        patch.setattr(cell_reuse, "VERSION", cell_reuse.VERSION + 1)
        project.keep()
    (old,) = (project.root / "kept" / cell_reuse.cell_folder(project.job)).glob("*.entry")
    an_hour_ago = time.time() - 3600
    os.utime(old, (an_hour_ago, an_hour_ago))
    assert project.look_up() == "the kept result is of another version"
    project.keep()
    project.model.write_text(MODEL.replace("SCALE = 2", "SCALE = 4"))
    assert project.look_up() == "the code of its model changed (models)"
