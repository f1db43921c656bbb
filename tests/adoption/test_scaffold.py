"""Files that `init` writes: all or none, and never over what a user has written or edited."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from pytest_torchcompile.adoption.example_inputs import Examined, ExampleTensor
from pytest_torchcompile.adoption.init_command import (
    _finds_packages,
    files_of_model,
    files_to_fill_in,
    refuse_other_models,
    write_files,
)
from pytest_torchcompile.adoption.matrix_text import MatrixModel, left_out_text, matrix_in_memory, matrix_text
from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.plan.matrix import load_matrix

GUESSED = Examined("models:TinyGPT", "", (ExampleTensor("idx", "int64", ("B", "S"), "3..49"),),
                   {"B": [4, 6, 10], "S": [12]}, "inference")
NAMED = Examined("models:build", "models:batch", (), {"B": [4, 6, 10]}, "training")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A project folder with a module."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text("def build(): ...\ndef batch(B): ...\nclass TinyGPT: ...\n")
    return tmp_path


def test_the_matrix_is_one(here):
    """It expands, keeps to its own schema, and names the inputs that are written beside it."""
    write_files(files_of_model(GUESSED), force=False)
    matrix = load_matrix("matrix/default.yaml")
    assert [planned.cell.id for planned in matrix.cells] == [
        f"tiny_gpt-{backend}-default-auto-none-inference" for backend in ("eager", "aot_eager", "inductor")]
    schema = json.loads(Path("matrix/matrix.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(Path("matrix/default.yaml").read_text()), schema)
    assert Path("matrix/default.yaml").read_text().startswith("# yaml-language-server: $schema=matrix.schema.json\n")
    code = Path("compile_inputs.py").read_text()
    assert "def batch(B, S):\n" in code
    assert '"idx": torch.randint(3, 50, (B, S)),\n' in code
    assert read_policy("release.yaml").matrix == "matrix/default.yaml"
    assert "from models import TinyGPT as make\n" in Path("conftest.py").read_text()


def test_arguments_that_are_left_out(here):
    """The written file says which, and so does the matrix in memory, in a note and in a form that can be edited."""
    examined = replace(GUESSED, left_out=("targets", "mask"))
    write_files(files_of_model(examined), force=False)
    code = Path("compile_inputs.py").read_text()
    assert "        # targets, mask: left at the default, so not tried; add what your callers give.\n    }\n" in code
    compile(code, "code", "exec")
    text = matrix_text(MatrixModel.of(examined))
    assert "targets: default, mask: default}" in text
    (note,) = matrix_in_memory("model:models:TinyGPT", text, here).notes
    assert note.endswith("S = 12; left at their defaults, so not tried: targets, mask")
    assert left_out_text(["a"]) == "left at its default, so not tried: a"
    assert left_out_text("abcdefghij") == "left at their defaults, so not tried: a, b, c, d, e, f, g, h and 2 more"
    (clean,) = matrix_in_memory("model:models:TinyGPT", matrix_text(MatrixModel.of(GUESSED)), here).notes
    assert "default" not in clean


@pytest.mark.needs_torch
def test_how_a_loss_with_labels_is_written(here):
    """Uncommented, with a model of the user's, it is a loss; where nothing is trained it is not spoken of."""
    write_files(files_of_model(replace(GUESSED, phase="training")), force=False)
    code = Path("compile_inputs.py").read_text()
    _, _, comment = code.partition("\n# class WithLabels")
    comment, _, _ = comment.partition("# written by ")
    lines = [line.removeprefix("# ").removeprefix("#") for line in f"# class WithLabels{comment}".splitlines()]
    made = {"torch": pytest.importorskip("torch")}
    exec("\n".join(lines).replace("= ...", "= torch.nn.Identity()"), made)
    torch = made["torch"]
    output = made["WithLabels"]()(torch.ones(4, dtype=torch.int64), input=torch.zeros(4, 10))
    assert made["loss"](output, {"labels": torch.ones(4, dtype=torch.int64)}).item() == pytest.approx(2.302585)
    files = {file.path: file.text for file in files_of_model(GUESSED)}
    assert "labels" not in files["compile_inputs.py"]


def test_named_inputs_need_no_file(here):
    """What the user has is not written again."""
    files = files_of_model(NAMED)
    assert "compile_inputs.py" not in [file.path for file in files]
    write_files(files, force=False)
    assert load_matrix("matrix/default.yaml").models["build"].inputs == "models:batch"


@pytest.mark.parametrize(("library", "expected"), [
    ("", "  pip install pytest-torchcompile\n"), ("transformers", "  pip install pytest-torchcompile transformers\n")])
def test_the_workflow_installs_the_library(library, expected):
    """Beside what the project needs, which its step finds out by itself."""
    workflow = next(file for file in files_of_model(NAMED, library) if file.part == "workflow")
    assert expected in workflow.text
    assert yaml.safe_load(workflow.text)["jobs"].keys() == {"cells", "gate"}


@pytest.mark.parametrize(("files", "expected"), [
    ({}, False),
    ({"pyproject.toml": "[tool.ruff]\n"}, False),
    ({"pyproject.toml": "[project]\nname = 'x'\n"}, True),
    ({"pyproject.toml": "[build-system]\nbuild-backend = 'setuptools.build_meta'\n[project]\n"}, True),
    ({"pyproject.toml": "[project]\n[tool.setuptools]\npackages = ['x']\n"}, False),
    ({"pyproject.toml": "[build-system]\nbuild-backend = 'hatchling.build'\n[project]\n"}, False),
    ({"pyproject.toml": "[project]\n", "setup.cfg": ""}, False),
    ({"pyproject.toml": "[project]\n", "src/x.py": ""}, False),
], ids=["none", "tools", "bare", "setuptools", "named", "hatchling", "setup.cfg", "src"])
def test_where_setuptools_would_take_the_matrix_for_a_package(here, files, expected):
    """A new folder beside the package ends its search for packages; `init` then says so."""
    for name, text in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    assert _finds_packages(here) == expected


def test_another_model_takes_no_models_place(here):
    """The matrix is written anew, and would lose the one that it has; the same model may come again."""
    write_files(files_of_model(NAMED), force=False)
    refuse_other_models("build")
    with pytest.raises(UsageError) as refused:
        refuse_other_models("tiny_gpt")
    assert str(refused.value) == (
        "matrix/default.yaml: has the model build, and init would write tiny_gpt in its place; add tiny_gpt beside it "
        "under `models:` (the file is yours then), or replace it by --force")
    write_files(files_to_fill_in(), force=True)
    refuse_other_models("tiny_gpt")


def test_again_changes_nothing(here):
    """Files of ours that nobody has edited are replaced."""
    write_files(files_of_model(GUESSED), force=False)
    before = {path: path.read_text() for path in here.rglob("*") if path.is_file()}
    write_files(files_of_model(GUESSED), force=False)
    assert {path: path.read_text() for path in here.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("path", "expected"), [
    ("matrix/default.yaml", "replace it by --force"),
    ("conftest.py", "leave it out by --without conftest, or replace it by --force"),
    (".github/workflows/compile-matrix.yml", "leave it out by --without workflow, or replace it by --force"),
    ("matrix/matrix.schema.json", "replace it by --force"),
])
def test_files_of_the_user_are_kept(here, path, expected):
    """Then nothing at all is written."""
    file = here / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine: 1\n")
    with pytest.raises(UsageError) as caught:
        write_files(files_of_model(GUESSED), force=False)
    assert str(caught.value) == (
        f"{path}: was not written by pytest-torchcompile, so it is not replaced; {expected}")
    assert not (here / "compile_inputs.py").exists()
    write_files(files_of_model(GUESSED), force=True)
    assert file.read_text() != "mine: 1\n"


@pytest.mark.parametrize("edit", [str.upper, "{}\n# mine\n".format, "# mine\n{}".format])
def test_edited_files_are_kept(here, edit):
    """Of ours too: the checksum of the last line is not theirs."""
    write_files(files_of_model(GUESSED), force=False)
    file = here / "conftest.py"
    text = file.read_text()
    first, last = text.rstrip().rsplit("\n", 1)
    file.write_text(f"{edit(first)}\n{last}\n")
    with pytest.raises(UsageError, match=r"^conftest.py: was edited since pytest-torchcompile wrote it, so it is not "
                                         "replaced; leave it out by --without conftest"):
        write_files(files_of_model(GUESSED), force=False)
    file.write_text(f"{first}\n")
    with pytest.raises(UsageError, match=r"^conftest.py: was not written by"):
        write_files(files_of_model(GUESSED), force=False)


def test_without_a_model(here, capsys):
    """A matrix to fill in, which says where; pytest names the place too."""
    assert main(["init"]) == 0
    out = capsys.readouterr().out
    line = next(number for number, text in enumerate(Path("matrix/default.yaml").read_text().splitlines(), 1)
                if "Fill in" in text)
    assert out.startswith("matrix/default.yaml written, with its schema for editors. Fill in your model at "
                          f"matrix/default.yaml:{line}, then run `pytest --compile-matrix`")
    assert sorted(file.path for file in files_to_fill_in()) == ["matrix/default.yaml", "matrix/matrix.schema.json"]
    assert main(["cells"]) == 4
    assert "no module 'my_package'" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "expected"), [
    (["models:build", "--from", "transformers:bert"], "--from names a model of a library; leave out the other one"),
    (["--inputs", "models:batch"], "--inputs: there is no model to call with them; name one, as in "
     "`pytest-torchcompile init module:Class --inputs module:function`"),
    (["models:build", "--without", "conftst"], "--without conftst: no such part; did you mean 'conftest'? Known: "
                                               "conftest, policy, workflow"),
    (["--from", "transfomers:bert"], "--from transfomers:bert: expected LIBRARY:NAME, such as transformers:bert; did "
                                     "you mean 'transformers'? Known: diffusers, timm, torchvision, transformers"),
    (["--from", "timm"], "--from timm: expected LIBRARY:NAME, such as transformers:bert; did you mean 'timm'? Known: "
                         "diffusers, timm, torchvision, transformers"),
    (["models:bild"], "init: 'models:bild' cannot be imported: models has no attribute 'bild'; did you mean 'build'? "
                      "Known: TinyGPT, batch, build"),
    (["models:build", "--inputs", "models"], "--inputs: 'models' names no code; expected module:attribute, for example "
                                             "my_models.gpt:build"),
])
def test_mistakes(here, capsys, arguments, expected):
    """One sentence, before anything is imported or written."""
    assert main(["init", *arguments]) == 4
    assert capsys.readouterr() == ("", f"{expected}\n")
    assert not (here / "matrix").exists()


def test_a_typo_is_told_before_files_that_are_there(here, capsys):
    """The matrix has been edited since init wrote it; that is another matter."""
    (here / "matrix").mkdir()
    (here / "matrix" / "default.yaml").write_text("version: 1\n")
    assert main(["init", "models:bild"]) == 4
    assert "models has no attribute 'bild'; did you mean 'build'?" in capsys.readouterr().err


def test_files_of_the_user_are_told_before_the_model_is_looked_at(here, capsys):
    """It may take long; and what is left out is no reason."""
    (here / "models.py").write_text("raise OSError('imported')\ndef build(): ...\n")
    (here / "conftest.py").write_text("mine = 1\n")
    assert main(["init", "models:build"]) == 4
    assert capsys.readouterr().err == ("conftest.py: was not written by pytest-torchcompile, so it is not replaced; "
                                       "leave it out by --without conftest, or replace it by --force\n")


def test_modules_in_src(here, capsys):
    """They are found where they are installed, or along PYTHONPATH."""
    (here / "src").mkdir()
    assert main(["init", "mypkg.net:Net"]) == 4
    assert capsys.readouterr().err == ("init: 'mypkg.net:Net' cannot be imported: no module 'mypkg'; Known: models; "
                                       "PYTHONPATH=src finds modules in src\n")


def test_a_folder_inside_a_project(here, capsys, monkeypatch):
    """Modules are looked up from the project's folder."""
    (here / "pyproject.toml").touch()
    (here / "inner").mkdir()
    monkeypatch.chdir(here / "inner")
    assert main(["init", "models:build"]) == 4
    assert capsys.readouterr().err == f"init: {here / 'inner'} lies in the project of {here}; run it there\n"
