"""Which of the files that a process opens are data of the cell, and which are this package's or a library's affair."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest

from pytest_torchcompile.reuse import watched_files
from pytest_torchcompile.reuse.watched_files import Opened

_heard: list | None = None


def _hear(event, args):
    if _heard is not None and event == "open":
        _heard.append(args)


# A hook stays for as long as the process does.
sys.addaudithook(_hear)


@pytest.fixture
def opened(monkeypatch):
    """What one process has noted."""
    seen = Opened()
    monkeypatch.setattr(watched_files, "_seen", seen)
    monkeypatch.setattr(watched_files, "_written", set())
    # Files of a test are older than its process began to watch.
    monkeypatch.setattr(watched_files, "_started", 4e9)
    return seen


@pytest.fixture
def take(opened, tmp_path):
    """A file is opened for reading, by code of some file."""
    def open_file(path, answers="", imported=()):
        watched_files._take_open(str(path), os.O_RDONLY, answers, tmp_path, set(imported))
        return opened

    return open_file


def test_a_new_temporary_file_is_no_data(opened, tmp_path, monkeypatch):
    """Python's audit event tells the folder that it is made in: Triton makes one for each kernel that it compiles."""
    heard = []
    monkeypatch.setattr(sys.modules[__name__], "_heard", heard)
    tempfile.NamedTemporaryFile(dir=tmp_path).close()
    tempfile.TemporaryFile(dir=tmp_path).close()
    monkeypatch.setattr(sys.modules[__name__], "_heard", None)
    flags_of_folder = [flags for path, _, flags in heard if path == str(tmp_path)]
    assert flags_of_folder
    for flags in flags_of_folder:
        watched_files._take_open(str(tmp_path), flags, "models.py", tmp_path, set())
    assert opened == Opened()


@pytest.mark.parametrize(("answers", "refused"), [("/v/site-packages/triton/backends/nvidia/compiler.py", False),
                                                  ("models.py", True)], ids=["Triton", "the project"])
def test_a_new_temporary_file_that_is_read_is_no_data_of_the_compilers(opened, tmp_path, monkeypatch, answers, refused):
    """Triton has its assembler write to one. The project may look into the folder that it has opened."""
    heard = []
    monkeypatch.setattr(sys.modules[__name__], "_heard", heard)
    tempfile.NamedTemporaryFile("r", dir=tmp_path).close()
    monkeypatch.setattr(sys.modules[__name__], "_heard", None)
    flags_of_folder = [flags for path, _, flags in heard if path == str(tmp_path)]
    assert [flags & (os.O_WRONLY | os.O_RDWR) for flags in flags_of_folder] == [os.O_RDONLY]
    watched_files._take_open(str(tmp_path), flags_of_folder[0], answers, tmp_path, set())
    assert bool(opened.untraceable) == refused


def test_a_folder_that_is_opened_cannot_be_followed(take, tmp_path):
    assert "which is no file" in take(tmp_path, "models.py").untraceable[0]


@pytest.mark.parametrize("variable", ["PYTEST_TORCHCOMPILE_PEAKS", "XDG_CACHE_HOME"])
def test_the_peaks_of_the_machine_are_no_data(take, tmp_path, monkeypatch, variable):
    """They are measured anew on another machine, or for another torch, and only timed cells read them."""
    place = tmp_path if variable == "XDG_CACHE_HOME" else tmp_path / "pytest-torchcompile/peaks.json"
    monkeypatch.setenv(variable, str(place))
    assert take(tmp_path / "pytest-torchcompile/peaks.json").files == {}
    assert take(tmp_path / "pytest-torchcompile/other.json").files.keys() == {
        str(tmp_path / "pytest-torchcompile/other.json")}


@pytest.mark.parametrize(("answers", "files", "all_code"), [
    ("/v/site-packages/hypothesis/internal/constants_ast.py", 0, True),
    ("/v/site-packages/torch/_dynamo/utils.py", 0, False),
    ("", 0, False),
    ("/v/site-packages/numba/core.py", 1, False),
    ("models.py", 1, False),
], ids=["hypothesis", "torch", "a traceback", "another library", "the project"])
def test_who_reads_the_source_of_a_module(take, tmp_path, answers, files, all_code):
    """Hypothesis takes constants from it, of all definitions and no comment; others may read what they like."""
    file = tmp_path / "models.py"
    file.write_text("x = 1\n")
    told = take(file, answers, imported=[str(file)])
    assert len(told.files) == files
    assert told.all_code is all_code


def test_data_that_hypothesis_reads_is_data(take, tmp_path):
    """Such as a file that is no module of the project."""
    file = tmp_path / "scale.json"
    file.write_text("2\n")
    told = take(file, "/v/site-packages/hypothesis/extra.py")
    assert told.files.keys() == {str(file)}
    assert not told.all_code
