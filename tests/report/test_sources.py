"""Sources that are edited while a run goes on, or after it; files that a run has imported."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Run, stated

from pytest_torchcompile.cli import main
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.origin import OriginRequest
from pytest_torchcompile.report import provenance
from pytest_torchcompile.report.provenance import Sources, git_state
from pytest_torchcompile.run.imported import edited_since, hash_of, imported_sources


def git(folder, *arguments):
    known = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(["git", "-c", "user.name=us", "-c", "user.email=us@example.org", *arguments], cwd=folder,
                          env=known, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path):
    """A repository whose matrix' root is a folder in it; one source has changes, and one is not tracked."""
    root = tmp_path / "project"
    root.mkdir()
    git(tmp_path, "init", "-q")
    for name in ("models.py", "changed.py", "matrix.yaml", "README.md"):
        (root / name).write_text("one\n")
    (tmp_path / "beside.py").write_text("one\n")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    (root / "changed.py").write_text("two\n")
    (root / "untracked.py").write_text("one\n")
    return root


@pytest.mark.parametrize("name", ["models.py", "changed.py", "untracked.py", "matrix.yaml", "../beside.py"])
@pytest.mark.parametrize("how", ["edit", "commit"])
def test_an_edit_during_the_run(project, name, how):
    """Also one that was committed meanwhile, after which nothing has changes."""
    before = Sources.take(project)
    assert before.edited_files({}) == []
    (project / name).write_text("edited\n")
    if how == "commit":
        git(project, "add", name)
        git(project, "commit", "-qm", "two")
    assert before.edited_files({}) == [name]


def test_a_tracked_file_that_goes(project):
    before = Sources.take(project)
    (project / "models.py").unlink()
    assert before.edited_files({}) == ["models.py"]


@pytest.mark.parametrize("what", ["generated", "gone", "readme", "committed", "hidden", "touched"])
def test_what_is_no_edit(project, what):
    before = Sources.take(project)
    if what == "generated":
        (project / "made.py").write_text("one\n")
        (project / "made.yaml").write_text("one\n")
    elif what == "gone":
        (project / "untracked.py").unlink()
    elif what == "readme":
        (project / "README.md").write_text("two\n")
    elif what == "committed":
        git(project, "add", "-A")
        git(project, "commit", "-qm", "what was there")
    elif what == "hidden":
        (project / ".cache").mkdir()
        (project / ".cache" / "made.py").write_text("one\n")
    else:
        os.utime(project / "models.py")
    assert before.edited_files({}) == []


def test_git_that_is_too_slow_is_no_edit(project, monkeypatch):
    before = Sources.take(project)
    (project / "models.py").write_text("two\n")
    monkeypatch.setattr(provenance, "PATIENCE", 0.0)
    assert before.edited_files({}) == []


def test_without_git_only_what_was_imported_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "models.py").write_text("one\n")
    before = Sources.take(tmp_path)
    (tmp_path / "models.py").write_text("two\n")
    assert before.edited_files({}) == []
    assert before.edited_files({"models.py": "0" * 64}) == ["models.py"]
    assert before.edited_files({"gone.py": "0" * 64}) == []


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A module that lies beside the project."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "net_outside.py").write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(place)
    importlib.import_module("net_outside")
    yield place / "net_outside.py"
    del sys.modules["net_outside"]


def test_what_was_imported(outside, tmp_path):
    """Modules of the project wherever they lie, no others, and each as it was when it was first seen."""
    root = tmp_path / "project"
    found = imported_sources(root)
    assert "../elsewhere/net_outside.py" in found
    installed = [name for name in found if "site-packages" in name or name.endswith(("/json/__init__.py", "/ast.py"))]
    assert not installed
    assert not [name for name in found if "pytest_torchcompile/" in name]
    assert edited_since(root, found) == []
    outside.write_text("WIDTH = 2\n")
    assert imported_sources(root) == found
    assert edited_since(root, found) == ["../elsewhere/net_outside.py"]


def test_an_installed_package_that_the_matrix_names_is_a_source():
    here = imported_sources(Path.cwd(), ["yaml.reader"])
    assert any(name.endswith("site-packages/yaml/reader.py") for name in here)


def test_the_gate_refuses_a_run_whose_sources_were_edited():
    (report,) = Run().reports()
    report.block["run"]["sources_edited"] = ["models.py"]
    for request in (OriginRequest(), OriginRequest(earlier=True)):
        outcome = gate([stated(report)], request=request)
        assert outcome.code == 2
        assert outcome.findings[0].text == "report.json: sources were edited while its run went on: models.py"


@pytest.mark.parametrize("imported", [True, False])
def test_sources_that_were_edited_after_the_run(project, capsys, imported):
    """The commit alone would call it a report of what lies there. What the run has imported is what it judged."""
    run = Run()
    run.git = git_state(project)
    run.sources = {"untracked.py": hash_of(project / "untracked.py")}
    (path,) = run.write(project)
    assert main(["gate", path]) == 0
    assert "edits" not in capsys.readouterr().out
    (project / ("untracked.py" if imported else "README.md")).write_text("two\n")
    assert main(["gate", path]) == (2 if imported else 0)
    told = capsys.readouterr().out
    if imported:
        assert f"unusable  {path} is older than edits in its folder: untracked.py" in told
        assert "run the matrix again, or judge earlier runs too by --earlier" in told
        assert main(["gate", path, "--earlier"]) == 0
        assert f"note      {path} is older than edits in its folder: untracked.py" in capsys.readouterr().out
    else:
        assert f"note      {path} is older than edits in its folder: files that git tracks" in told
        assert "run the matrix again to have them judged" in told


POLICY = "version: 1\n"
EDITED = "version: 1\n# What we take.\n"


@pytest.fixture
def judged(project):
    """The repository with a policy, and nothing else that is changed; its commit's SHA is what the gate wants."""
    (project / "policy.yaml").write_text(POLICY)
    (project / "link.yaml").symlink_to("policy.yaml")
    (project / "policy.py").write_text(POLICY)
    git(project, "add", "policy.yaml", "policy.py", "link.yaml", "changed.py")
    git(project, "commit", "-qm", "policy")
    return project


@pytest.mark.parametrize(("edited", "policy", "code"), [
    (["policy.yaml"], "policy.yaml", 0),
    (["policy.yaml", "models.py"], "policy.yaml", 2),
    (["models.py"], "policy.yaml", 2),
    # What a link leads to, and what Python could import, counts as every other file.
    (["policy.yaml"], "link.yaml", 2),
    (["policy.py"], "policy.py", 2),
    (["policy.yaml"], "", 2),
])
def test_the_policy_that_judges_is_no_source(judged, capsys, edited, policy, code):
    """It is read when the run is over: an edit before the run, or after it, made no other verdict."""
    clean = git_state(judged)
    for name in edited:
        (judged / name).write_text(EDITED)
    arguments = ["--policy", str(judged / policy)] * bool(policy)
    run = Run()
    run.git = git_state(judged)
    (path,) = run.write(judged)
    assert main(["gate", path, "--commit", clean["commit"], *arguments]) == code
    assert ("with uncommitted changes" in capsys.readouterr().out) == (code == 2)
    run.git = clean
    (path,) = run.write(judged)
    assert main(["gate", path, *arguments]) == 0
    assert ("is older than edits in its folder" in capsys.readouterr().out) == (code == 2)


def test_a_policy_that_was_edited_once_more_is_an_unknown_change(judged, capsys):
    """The run told a hash of its changes, and it is another one now."""
    (judged / "policy.yaml").write_text(EDITED)
    run = Run()
    run.git = git_state(judged)
    (path,) = run.write(judged)
    (judged / "policy.yaml").write_text(POLICY + "# And this.\n")
    assert main(["gate", path, "--commit", run.git["commit"], "--policy", str(judged / "policy.yaml")]) == 2
    assert "with uncommitted changes" in capsys.readouterr().out
