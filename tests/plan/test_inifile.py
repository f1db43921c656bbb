"""The matrix that commands take where none is named, as pytest would."""

from __future__ import annotations

import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.plan.matrix_path import default_matrix, ini_setting

MATRIX = "version: 1\nmodels: {gpt: {factory: zoo:gpt, inputs: zoo:batch}}\naxes: {backend: [eager]}\n"
INI = {
    "pytest.toml": "[pytest]\ncompile_matrix = 'm.yaml'\n",
    "pytest.ini": "[pytest]\ncompile_matrix = m.yaml\n",
    "pyproject.toml": "[tool.pytest.ini_options]\ncompile_matrix = 'm.yaml'\n",
    "tox.ini": "[tox]\n[pytest]\ncompile_matrix = m.yaml\n",
    "setup.cfg": "[tool:pytest]\ncompile_matrix = m.yaml\n",
}


@pytest.mark.parametrize("name", INI)
def test_each_file_that_pytest_reads(tmp_path, name):
    (tmp_path / name).write_text(INI[name])
    (tmp_path / "m.yaml").write_text(MATRIX)
    below = tmp_path / "below"
    below.mkdir()
    assert ini_setting(below, "compile_matrix") == ("m.yaml", tmp_path / name)
    chosen = default_matrix(below)
    assert chosen.path == tmp_path / "m.yaml"
    assert chosen.why == f"matrix: m.yaml, by the key compile_matrix of {tmp_path / name}"


def test_native_settings_of_pyproject(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.pytest]\ncompile_matrix = 'shipped:smoke'\n")
    assert str(default_matrix(tmp_path).path) == "shipped:smoke"


@pytest.mark.parametrize(("name", "text"), [
    ("pytest.ini", ""), ("pytest.ini", "[pytest]\n"), ("tox.ini", "[tox]\n"), ("pyproject.toml", "["),
    ("setup.cfg", "no section\n"), ("pyproject.toml", "[tool]\npytest = 1\n"),
])
def test_files_that_say_nothing(tmp_path, name, text):
    """Pytest's own file ends the search, also an empty one."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ncompile_matrix = shipped:fake\n")
    below = tmp_path / "below"
    below.mkdir()
    (below / name).write_text(text)
    told = default_matrix(below).why
    if name == "pytest.ini":
        assert told == "matrix: shipped:default, because there is no matrix/default.yaml here"
    else:
        assert told.startswith("matrix: shipped:fake, by the key compile_matrix of ")


def test_cells_takes_the_matrix_of_the_ini_key(project, monkeypatch, capsys):
    """It says which, apart from what it prints for other programs."""
    (project.root / "pytest.ini").write_text("[pytest]\ncompile_matrix = matrix/other.yaml\n")
    project.file.with_name("other.yaml").write_text(MATRIX)
    monkeypatch.chdir(project.root)
    assert main(["cells"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("gpt-eager-default-auto-none  run\n1 cell: 1 run\n")
    assert told.err == f"matrix: matrix/other.yaml, by the key compile_matrix of {project.root / 'pytest.ini'}\n"
    assert main(["cells", "matrix/other.yaml"]) == 0
    assert capsys.readouterr().err == ""


def test_an_ini_key_that_names_nothing(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\ncompile_matrix = lost.yaml\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MatrixError, match=r"lost\.yaml"):
        load_matrix(default_matrix().path)
