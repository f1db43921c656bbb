"""The command ``pytest-torchcompile init``: from a model to a matrix with its first verdicts.

The files that it writes are made as texts, and written: all, or none where one is there already.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pytest_torchcompile.adoption import LEAVE_OUT, LIBRARIES
from pytest_torchcompile.adoption.example_inputs import Examined, Request
from pytest_torchcompile.adoption.matrix_text import (
    SCHEMA_FILE,
    MatrixModel,
    examine_target,
    left_out_text,
    matrix_text,
    matrix_to_fill_in,
    refuse_wrong_names,
)
from pytest_torchcompile.adoption.next_steps import POLICY_FILE, next_lines, seconds_of_first_cells
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.plan.matrix import find_root, load_matrix
from pytest_torchcompile.plan.matrix_path import DEFAULT, PREFIX
from pytest_torchcompile.plan.matrix_schema import matrix_schema
from pytest_torchcompile.report.safe_output import REPORT_FILE, refuse_others, write_output

__all__ = ["NewFile", "files_of_model", "files_to_fill_in", "refuse_files_of_user", "refuse_other_models",
           "run_command", "write_files"]

INPUTS_MODULE: Final = "compile_inputs"
CONFTEST: Final = "conftest.py"
WORKFLOW: Final = ".github/workflows/compile-matrix.yml"
_INSTALL: Final = "          pip install pytest-torchcompile\n"
"""The line of the workflow that installs what the project itself does not name."""


@dataclass(frozen=True)
class NewFile:
    """A file to write. ``part``: its word for ``--without``, if it has one."""

    path: str
    text: str
    what: str
    part: str = ""


def files_of_model(examined: Examined, library: str = "") -> list[NewFile]:
    """All files for a model. ``library``: what it is of, if it is a library's."""
    model = MatrixModel.of(examined)
    files = []
    if code := _inputs_code(examined):
        inputs = f"{INPUTS_MODULE}:batch" if examined.tensors else examined.inputs
        factory = f"{INPUTS_MODULE}:model" if examined.code else examined.factory
        model = replace(model, factory=factory, inputs=inputs)
        files.append(NewFile(f"{INPUTS_MODULE}.py", code, "what the model is called with"))
    return [
        NewFile(DEFAULT, matrix_text(model), "the matrix"),
        _schema_file(),
        *files,
        NewFile(CONFTEST, _conftest(model.factory), "the fixture `model`, for tests of your own", "conftest"),
        NewFile(WORKFLOW, _workflow(library), "a workflow of GitHub Actions", "workflow"),
        NewFile(POLICY_FILE, _policy(), "what the gate asks of a release", "policy"),
    ]


def files_to_fill_in() -> list[NewFile]:
    """The files where no model was named."""
    return [NewFile(DEFAULT, matrix_to_fill_in(), "the matrix, with a model to fill in"), _schema_file()]


def refuse_files_of_user(without: Sequence[str]) -> None:
    """Refuse files that are there and not ours, before anybody has waited for a model to be looked at.

    Raises as :func:`write_files`, which looks again at all that it writes.
    """
    for path, part in ((DEFAULT, ""), (CONFTEST, "conftest"), (WORKFLOW, "workflow"), (POLICY_FILE, "policy")):
        if part not in without:
            _refuse_file(path, part)


def _refuse_file(path: str, part: str) -> None:
    advice = "replace it by --force"
    if part:
        advice = f"leave it out by --without {part}, or {advice}"
    refuse_others(Path(path), advice)


def write_files(files: Sequence[NewFile], *, force: bool) -> None:
    """Write all of them into this folder, or none where one is there and is not ours, unless ``force``.

    Raises :class:`~pytest_torchcompile.errors.UsageError` that names the file.
    """
    for file in files:
        if not force:
            _refuse_file(file.path, file.part)
    for file in files:
        write_output(file.path, file.text, force=True)


def _schema_file() -> NewFile:
    path = str(Path(DEFAULT).with_name(SCHEMA_FILE))
    return NewFile(path, json.dumps(matrix_schema(), separators=(",", ":")), "its schema, for editors")


def _inputs_code(examined: Examined) -> str:
    """The module with the model's inputs, and with a model of a library itself; empty where the user has both."""
    if not examined.tensors and not examined.code:
        return ""
    lines = [f'"""What {DEFAULT} compiles is called with this."""', ""]
    made = examined.code or "import torch"
    # Of torch's own generator, which is seeded before each call.
    if examined.tensors and "import torch\n" not in f"{made}\n":
        lines += ["import torch"]
    lines += [made]
    if examined.tensors:
        lines += ["", "", f"def batch({', '.join(examined.dims)}):",
                  f'    """One batch of {examined.name}, as keyword arguments of its forward."""', "    return {"]
        lines += [f'        "{tensor.name}": {tensor.code()},' for tensor in examined.tensors]
        if examined.left_out:
            lines += textwrap.wrap(f"{', '.join(examined.left_out)}: left at the default, so not tried; add what your "
                                   "callers give.", 110, initial_indent="        # ", subsequent_indent="        # ")
        lines += ["    }"]
        if examined.phase == "training":
            lines.append(_LOSS_TEXT)
    return "\n".join(lines)


_LOSS_TEXT: Final = """

# To judge the gradients of your own loss, name it in the matrix: `loss: compile_inputs:loss`. It gets the model's
# output and the batch. Labels are a part of the batch, so the model takes them too, or one around it does:
#
# class WithLabels(torch.nn.Module):           # `factory: compile_inputs:WithLabels`
#     def __init__(self):
#         super().__init__()
#         self.model = ...
#
#     def forward(self, labels, **inputs):
#         return self.model(**inputs)
#
# def loss(output, batch):                     # and batch() returns "labels": torch.randint(10, (B,)) too
#     return torch.nn.functional.cross_entropy(output, batch["labels"])"""
"""How a loss with labels is written, below the inputs."""


def _conftest(factory: str) -> str:
    module, _, attribute = factory.partition(":")
    first = attribute.partition(".")[0]
    return f'''"""Fixtures for tests of your own that use the fixture compiled_model of pytest-torchcompile."""

import pytest


@pytest.fixture
def model():
    """What compiled_model compiles."""
    # Here, so that collecting tests stays light.
    from {module} import {first} as make

    return {"make" + attribute[len(first):]}()
'''


def _workflow(library: str) -> str:
    """The workflow for CPU runners, which finds out by itself how the project is installed."""
    text = (_ci_folder() / "github-cpu.yml").read_text(encoding="utf-8")
    text = text.replace("copy to .github/workflows/compile-matrix.yml.", "written by `pytest-torchcompile init`.")
    if library:
        return text.replace(_INSTALL, f"{_INSTALL.rstrip()} {library}\n")
    return text


def _ci_folder() -> Path:
    """In a wheel the workflows are in the package; in the repository they are in ``docs/ci``."""
    package = Path(__file__).parent.parent
    inside = package / "ci"
    if inside.is_dir():
        return inside
    return package.parent / "docs" / "ci"


def _policy() -> str:
    return f"""\
# What a release asks of a run of the matrix:
#   pytest-torchcompile gate --policy {POLICY_FILE}
# Every key but `version` may be left out. Without this file every cell must pass, or be expected to fail by the matrix.
version: 1
matrix: {DEFAULT}           # the report must be of this very file
ran_at_least: 1                        # cells that really ran compiled code; --update-policy raises it
# commit: HEAD                         # the report must be of the commit that is checked out
# max_age: 24h                         # since the run ended
# environment: {{torch: "2.13.*"}}
# allowed_skips:
#   - cells: {{backend: inductor}}
#     reason: no C++ compiler on this machine
"""


# ---------------------------------------------------------------------------------------------------------- the command
_PACKAGES_NOTE: Final = """\
note: pyproject.toml leaves it to setuptools to find the packages, which takes the new folder matrix for one too.
      `pip install .` may fail until yours are named: `[tool.setuptools]` with `packages = ["your_package"]`."""
_BUILD: Final = "pytest_torchcompile.adoption.library_models:build"
"""What makes a model of a library; its module needs torch."""
_SMOKE: Final = "compile_cell(backend='eager') or compile_cell(backend='aot_eager')"
"""The cells that are run at once: they need no C++ compiler."""


def run_command(given: argparse.Namespace) -> int:
    """Write the files, run the first cells, and say what comes next.

    Returns 0, also where cells fail: that is what was to be found out; or pytest's code where it could not run them.
    Raises :class:`UsageError` for what can't be examined, and for files that are there and not ours.
    """
    folder = Path.cwd()
    _refuse_arguments(given)
    _refuse_other_folder(folder)
    if not (given.model or given.factory or given.source):
        write_files(files_to_fill_in(), force=given.force)
        _print_fill_in(folder)
        return 0
    request = _request_of(given, folder)
    # A typo first: who mends it would else be told of the files, and of the typo afterwards.
    refuse_wrong_names(request)
    if not given.force:
        refuse_files_of_user(given.without)
    examined = _examine(given, request)
    if not given.force:
        refuse_other_models(MatrixModel.of(examined).name)
    library = (given.source or "").partition(":")[0]
    files = [file for file in files_of_model(examined, library) if file.part not in given.without]
    write_files(files, force=given.force)
    _print_written(examined, files)
    if _finds_packages(folder):
        print(_PACKAGES_NOTE)
    code = 0
    if not given.no_run:
        code = _run_first_cells(folder)
    seconds = 0.0 if given.no_run else seconds_of_first_cells(folder / REPORT_FILE)
    print("", *next_lines(seconds), sep="\n", flush=True)
    return code


def refuse_other_models(name: str) -> None:
    """Raise UsageError where the matrix has other models: it is written anew, and would lose them."""
    try:
        models = list(load_matrix(DEFAULT).models)
    # None is there, or it is one to fill in, or its model is gone: then nothing is lost.
    except UsageError:
        return
    others = [other for other in models if other != name]
    if others:
        raise UsageError(f"{DEFAULT}: has the model {others[0]}, and init would write {name} in its place; add {name} "
                         f"beside it under `models:` (the file is yours then), or replace it by --force")


def _refuse_arguments(given: argparse.Namespace) -> None:
    if given.source and (given.model or given.factory):
        raise UsageError("--from names a model of a library; leave out the other one")
    if given.inputs and not (given.model or given.factory or given.source):
        raise UsageError("--inputs: there is no model to call with them; name one, as in `pytest-torchcompile init "
                         "module:Class --inputs module:function`")
    for part in given.without:
        if part not in LEAVE_OUT:
            raise UsageError(f"--without {part}: no such part; {nearest(part, LEAVE_OUT)}")
    if given.source:
        library, colon, name = given.source.partition(":")
        if library not in LIBRARIES or not colon or not name:
            raise UsageError(f"--from {given.source}: expected LIBRARY:NAME, such as transformers:bert; "
                             f"{nearest(library, LIBRARIES)}")


def _refuse_other_folder(folder: Path) -> None:
    """A matrix looks modules up in its project's folder, so that is where the files belong."""
    root = find_root(folder / DEFAULT)
    if root != folder:
        raise UsageError(f"init: {folder} lies in the project of {root}; run it there")


def _request_of(given: argparse.Namespace, folder: Path) -> Request:
    """What is to be examined, by the option that names it."""
    request = Request(str(folder), given.factory or given.model or _BUILD, given.inputs or "")
    if given.source:
        return replace(request, arguments={"source": given.source}, where=f"--from {given.source}")
    if given.factory:
        return replace(request, where="--factory")
    return request


def _examine(given: argparse.Namespace, request: Request) -> Examined:
    if not given.source:
        return examine_target(request)
    if not given.inputs:
        request = _with_known_inputs(request, given.source)
    return replace(examine_target(request), factory=f"model:{given.source.partition(':')[2]}")


def _with_known_inputs(request: Request, source: str) -> Request:
    """The inputs that ``shipped:real`` has for a model that it has too."""
    name = source.partition(":")[2]
    models = load_matrix(f"{PREFIX}real").models
    for known in (name, f"timm_{name}", f"tv_{name}"):
        if known in models:
            entry = models[known]
            dims = {dim: list(sizes.listed or (sizes.size or 1,)) for dim, sizes in entry.dims.items()}
            return replace(request, inputs=entry.inputs, dims=dims)
    return request


def _print_written(examined: Examined, files: Sequence[NewFile]) -> None:
    """What was found out, and each file."""
    print(f"{examined.name}: {examined.phase}, inputs {_inputs_text(examined)}")
    if function := examined.inputs_beside:
        print(f"  these are guesses; if {function} makes inputs, name it: --inputs {function}")
    if examined.phase == "training":
        print("  inference is not tried: where that is what you ship, write `phase: [training, inference]`")
    for file in files:
        print(f"  {file.path:<40} {file.what}")


def _inputs_text(examined: Examined) -> str:
    words = [examined.inputs] if examined.inputs else []
    words += [f"{tensor.name}: {tensor}" for tensor in examined.tensors]
    words += [f"{name} = {', '.join(map(str, sizes))}" for name, sizes in examined.dims.items()]
    if examined.left_out:
        words.append(left_out_text(examined.left_out))
    return "; ".join(words)


def _finds_packages(folder: Path) -> bool:
    """Whether setuptools looks for packages among the folders beside pyproject.toml (its "flat layout")."""
    file = folder / "pyproject.toml"
    # With an old setup file or a folder src it looks elsewhere.
    if not file.exists() or any((folder / name).exists() for name in ("setup.py", "setup.cfg", "src")):
        return False
    text = file.read_text(encoding="utf-8", errors="replace")
    if not re.search(r"^\[project\]", text, re.MULTILINE) or re.search(r"^\[tool\.setuptools\b", text, re.MULTILINE):
        return False
    # Without a build backend pip takes setuptools.
    backend = re.search(r"^build-backend\s*=\s*[\"'](\w+)", text, re.MULTILINE)
    return not backend or backend[1] == "setuptools"


def _print_fill_in(folder: Path) -> None:
    lines = (folder / DEFAULT).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "Fill in" in text)
    print(f"{DEFAULT} written, with its schema for editors. Fill in your model at {DEFAULT}:{line}, then run "
          "`pytest --compile-matrix`;\nor have a model looked at: `pytest-torchcompile init module:Class --force`")


def _run_first_cells(folder: Path) -> int:
    """Run the first cells, and show pytest's own output."""
    arguments = [f"--compile-matrix={DEFAULT}", "-m", _SMOKE]
    print(f"\n$ pytest {arguments[0]} -m \"{_SMOKE}\"", flush=True)
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=folder, check=False)
    # Cells that fail are what was to be found out.
    return 0 if done.returncode in (0, 1) else done.returncode
