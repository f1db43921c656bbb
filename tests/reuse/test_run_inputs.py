"""What a run read, held against what is there now."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.reuse import run_inputs
from pytest_torchcompile.reuse.cell_key import source_use, why_untraceable
from pytest_torchcompile.reuse.definitions import SourceUse
from pytest_torchcompile.reuse.run_inputs import RunInputs, files_differ, modules_differ, places_of_names
from pytest_torchcompile.reuse.watched_files import hash_of_listing
from pytest_torchcompile.run.imported import hash_of


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package and a module, imported as a run would, and data."""
    monkeypatch.setattr("sys.path", [])
    for name in ("models.py", "parts/__init__.py", "parts/layers.py", "data/scale.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"'{name}'\n")
    inputs = RunInputs(
        modules={"models": "models.py", "parts": "parts/__init__.py", "parts.layers": "parts/layers.py"},
        absent=["parts.fast"], names=["models", "parts", "json", "missing"],
        files={"data/scale.json": hash_of(tmp_path / "data/scale.json"), "data/gone.json": ""},
        folders={"data": hash_of_listing(tmp_path / "data")},
    )
    inputs.places = places_of_names(inputs, tmp_path)
    return inputs, tmp_path


@pytest.mark.parametrize(("file", "text"), [
    ("models/__init__.py", "the module models is not found in models.py any more"),
    ("parts/layers/__init__.py", "the module parts.layers is not found in parts/layers.py any more"),
    ("parts/fast.py", "there is a module parts.fast now"),
    ("json.py", "json may be imported from another place now"),
    ("missing/__init__.py", "missing may be imported from another place now"),
    ("unrelated.py", ""),
    ("parts/other.py", ""),
])
def test_a_new_file_that_takes_a_modules_place(project, file, text):
    """Also of a module that was looked for in vain, and of one of Python's own."""
    inputs, root = project
    assert modules_differ(inputs, root) == ""
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text("")
    run_inputs._importable_names.cache_clear()
    importlib.invalidate_caches()
    assert modules_differ(inputs, root) == text


def test_a_module_that_is_gone(project):
    """It is not found."""
    inputs, root = project
    (root / "parts/layers.py").unlink()
    importlib.invalidate_caches()
    assert modules_differ(inputs, root).startswith("the module parts.layers is not found")


@pytest.mark.parametrize(("file", "expected"), [
    ("data/scale.json", "data/scale.json"), ("data/gone.json", "data/gone.json"), ("data/new.json", "data"),
    ("other.json", ""),
])
def test_data_that_changed(project, file, expected):
    """Another content, a file that was not there, and another name in a folder that was listed."""
    inputs, root = project
    assert files_differ(inputs, root) == ""
    (root / file).write_text("another text")
    assert files_differ(inputs, root) == expected


def test_ranks_that_read_different_contents():
    """Nobody knows then of which of them the result is."""
    one, other = RunInputs(files={"a": "1"}).to_dict(), RunInputs(files={"a": "2", "b": "3"}).to_dict()
    assert RunInputs.of_ranks([one, one]).untraceable == []
    joined = RunInputs.of_ranks([one, other])
    assert joined.untraceable == ["the ranks have read different contents of one file"]
    assert joined.files.keys() == {"a", "b"}


def test_constants_of_all_definitions_may_be_drawn(make_job, tmp_path):
    """Where that is done in any rank, an edit of a model that the cell does not use counts too; a comment does not."""
    joined = RunInputs.of_ranks([RunInputs(all_code=True).to_dict(), RunInputs().to_dict()])
    assert joined.all_code
    entry = ModelEntry("net", "models:net", "models:batch", where="a.yaml:1:1").to_dict()
    job = replace(make_job("cpu"), cell=Cell(model="net").to_dict(), entry=entry, root=str(tmp_path))

    def digest(text, all_code):
        (tmp_path / "models.py").write_text(text)
        return source_use(RunInputs(modules={"models": "models.py"}, all_code=all_code), job).digest

    text = "def net():\n    return 1\n\ndef other():\n    return 2\n"
    for all_code in (True, False):
        first = digest(text, all_code)
        assert (digest(text.replace("2", "3"), all_code) != first) is all_code
        assert digest(f"{text}# a comment\n", all_code) == first


@pytest.mark.parametrize(("identifiers", "device", "text"), [
    ({"forward"}, "cpu", ""),
    ({"exists", "stat"}, "cpu", "its code asks whether files are there (exists, stat)"),
    ({"safe_open"}, "cpu", "its code may read files where Python does not see it (safe_open)"),
    ({"access"}, "cpu", "its code asks whether files are there (access)"),
    ({"readlink", "resolve()"}, "cpu", "its code asks where links lead (readlink, resolve())"),
    ({"forward"}, "mps", "nothing is known of the device mps"),
])
def test_what_can_not_be_followed(identifiers, device, text, make_job):
    """Each with the reason."""
    use = SourceUse("", frozenset(identifiers))
    assert why_untraceable(RunInputs(), use, make_job(device)) == text
    told = RunInputs(untraceable=["models.py starts a process"])
    assert why_untraceable(told, use, make_job(device)).startswith("models.py starts a process")


@pytest.mark.parametrize(("names", "text"), [
    (["models", "torch"], ""),
    (["tables", "torch"], "its code may read files where Python does not see it (tables)"),
])
def test_the_name_of_a_package_that_nobody_asked_for_is_another_things(names, text, make_job):
    """A recommender calls its embeddings so."""
    use = SourceUse("", frozenset({"tables", "forward"}))
    assert why_untraceable(RunInputs(names=names), use, make_job("cpu")) == text


@pytest.fixture
def make_job():
    """A job on a device."""
    from pytest_torchcompile.observation import Job

    return lambda device: Job({"device": device}, {}, "", ())


@pytest.mark.parametrize(("place", "cached"), [("cache/ab/k.main.so", True), ("cache-of-project/k.main.so", False)])
def test_what_the_compiler_made_is_no_module_of_the_project(place, cached, tmp_path, monkeypatch):
    """Wherever its cache is, such as in the folder that CI keeps between runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    inputs = RunInputs()
    run_inputs._take_module(inputs, "k.kernel", str(tmp_path / place), tmp_path)
    assert bool(inputs.untraceable) is not cached
    assert not inputs.modules


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_cache_that_holds_the_project_hides_none_of_its_modules(variable, tmp_path, monkeypatch):
    """Else its results would be reused whatever its code is."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    for folder in (tmp_path, project):
        monkeypatch.setenv(variable, str(folder))
        inputs = RunInputs()
        run_inputs._take_module(inputs, "models", str(project / "models.py"), project)
        assert inputs.modules == {"models": "models.py"}
