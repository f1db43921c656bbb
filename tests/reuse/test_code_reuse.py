"""Comparisons of earlier runs are offered while machine, packages, variables and what is asked are the same."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.reuse import cell_key, code_reuse
from pytest_torchcompile.reuse.cell_reuse import CellReuse
from pytest_torchcompile.reuse.code_reuse import CodeReuse
from pytest_torchcompile.reuse.run_inputs import RunInputs

PLANNED = PlannedCell(Cell(model="net"))
OBSERVATION = Observation("net", {"compiles": {"graphs": []}})


class Runs:
    """Runs in one repository, in a package of which a file is imported."""

    def __init__(self, root):
        self.root, self.package = root, root / "site-packages" / "thing.py"
        self.package.parent.mkdir()
        self.package.write_text("one")
        entry = ModelEntry("net", "models:net", "models:batch", where="a.yaml:1:1")
        self.job = Job(PLANNED.cell.to_dict(), entry.to_dict(), str(root), ("equivalence",))

    def begin(self, run="first"):
        return CodeReuse(CellReuse(self.root / "kept", lambda: {"run": run, "commit": "abc", "changed": False}))

    def keep(self, made, planned=PLANNED, observation=OBSERVATION, run="first"):
        from pytest_torchcompile.reuse.run_inputs import _first_hash

        _first_hash.cache_clear()
        read = [RunInputs(installed={str(self.package): _first_hash(str(self.package))}).to_dict()]
        return self.begin(run).keep(planned, self.job, observation, made, read)

    def known(self, planned=PLANNED, job=None):
        from pytest_torchcompile.reuse.run_inputs import _first_hash

        _first_hash.cache_clear()
        return self.begin("later").look_up(planned, job or self.job)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Where the machine is always the same."""
    monkeypatch.setattr("pytest_torchcompile.reuse.cell_key.machine_digests", lambda: {"the machine": "a"})
    return Runs(tmp_path)


def test_what_was_kept_is_offered(runs):
    """Of several runs together; what is told is the oldest run of which something was taken."""
    assert runs.known().leaves == {}
    assert runs.keep({"k1": ["old"], "k2": ["old"]}) == ""
    time.sleep(0.02)
    runs.keep({"k2": ["new"], "k3": ["new"]}, run="second")
    known = runs.known()
    assert known.leaves.keys() == {"k1", "k2", "k3"}
    assert known.origin(["k3"]) == {"run": "second", "commit": "abc", "changed": False, "age": 0, "comparisons": 1}
    assert known.origin(["k1", "k3"])["run"] == "first"
    # What one process offers changes nothing of what a cell is asked.
    assert runs.known(job=replace(runs.job, comparisons=known.leaves)).leaves == known.leaves


@pytest.mark.parametrize("change", [
    lambda runs, patch: patch.setattr(f"{cell_key.__name__}.machine_digests", lambda: {"the machine": "b"}),
    lambda runs, patch: patch.setenv("MY_SETTING", "1"),
    lambda runs, patch: patch.chdir(runs.package.parent),
    lambda runs, patch: runs.package.write_text("two"),
    lambda runs, patch: patch.setattr(code_reuse, "_VERSION", 3),
    lambda runs, patch: setattr(runs, "job", replace(runs.job, checks=("equivalence", "gradients"))),
    lambda runs, patch: setattr(runs, "job", replace(runs.job, limits={"rms": 5.0})),
    lambda runs, patch: setattr(runs, "job", replace(runs.job, seed=1)),
    lambda runs, patch: setattr(runs, "job", replace(runs.job, threads=2)),
    lambda runs, patch: setattr(runs, "job", replace(runs.job, cell=Cell(model="net", mode="max-autotune").to_dict())),
    lambda runs, patch: [file.unlink() for file in runs.root.glob("kept/lists/*")],
], ids=["machine", "variable", "working folder", "package", "version", "checks", "limits", "seed", "threads", "mode",
        "list gone"])  # fmt: skip
def test_nothing_is_offered_after_a_change(runs, change, monkeypatch):
    """Of what the cell's own values do not tell."""
    runs.keep({"k1": ["old"]})
    assert runs.known().leaves
    change(runs, monkeypatch)
    assert runs.known().leaves == {}


def test_what_is_not_kept(runs):
    """Expected failures, timed cells and models that waver, each with the reason."""
    expected = replace(PLANNED, outcome="xfail")
    assert runs.keep({"k1": []}, planned=expected) == "a cell with a rule `xfail` always runs"
    wavering = Observation("net", {"equivalence": {"leaves": [{"kind": "nondeterministic"}]}})
    assert runs.keep({"k1": []}, observation=wavering) == "a model whose runs differ is always run"
    (runs.root / "kept").write_text("a file in its place")
    assert runs.keep({"k1": []}) == f"{runs.root / 'kept'} can't be written"


def test_an_expected_failure_takes_nothing(runs):
    """It is judged anew each time."""
    runs.keep({"k1": ["old"]})
    assert runs.known(planned=replace(PLANNED, outcome="xfail")).leaves == {}


@pytest.mark.parametrize("entry", [
    {}, {"version": 2}, {"version": 2, "parts": 5}, {"at": "x"}, {"comparisons": 5}, {"run": None},
], ids=str)
def test_an_entry_that_somebody_has_written_by_hand(runs, entry):
    """It is passed over."""
    runs.keep({"k1": ["old"]})
    store = runs.begin()._results.store
    folder = code_reuse._folder_of(runs.job)
    (good,) = store.entries(folder)
    good.pop("file")
    store.keep(folder, {**good, "comparisons": {"k9": []}, **entry} if entry and "version" not in entry else entry)
    assert runs.known().leaves == {"k1": ["old"]}
