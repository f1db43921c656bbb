"""Matrices that are not files of the repository: shipped ones by name, and one that lies outside the rootdir."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_torchcompile.plan.matrix_path import shipped_names, shipped_path

pytestmark = pytest.mark.needs_torch
CELL = "tiny_head-eager-default-auto-none-inference"


def again_commands(result):
    """What the lines `again` say, without quotes. Where CI is set, pytest's summary has them a second time."""
    lines = dict.fromkeys(line.strip() for line in result.stdout.lines if line.strip().startswith("again  "))
    return [line.removeprefix("again  pytest ").replace("'", "").split(" ") for line in lines]


def test_without_a_matrix_the_shipped_ones_are_named(pytester):
    """One sentence, exit code 4: what is not there, and what can be run instead."""
    result = pytester.runpytest_inprocess("--compile-matrix")
    assert result.ret == 4
    (line,) = (line for line in result.stderr.lines if line.startswith("ERROR"))
    assert line == (f"ERROR: there is no matrix/default.yaml in {pytester.path}: `pytest-torchcompile init "
                    "module:Class` writes one for your model, --compile-model=module:Class does without, and "
                    "--compile-matrix=shipped:smoke names a shipped one "
                    "(shipped are artifacts, contract, default, fake, fuzz, gpu, multi_gpu, nightly, real, smoke, "
                    "toolkit)")


def test_a_name_that_is_not_shipped(pytester):
    """The nearest is named."""
    result = pytester.runpytest_inprocess("--compile-matrix=shipped:smok")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*ERROR: 'shipped:smok' is not a shipped matrix; did you mean 'smoke'?*"])


def test_every_shipped_matrix_has_its_name():
    """They are the files of the folder `matrix`, or in a wheel their copies."""
    assert shipped_names() == ("artifacts", "contract", "default", "fake", "fuzz", "gpu", "multi_gpu", "nightly",
                               "real", "smoke", "toolkit")
    assert all(shipped_path(f"shipped:{name}").is_file() for name in shipped_names())


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_shipped_matrix_runs_by_its_name(repo, workers):
    """Node ids, report and journal carry the name that was typed; the report is the user's, not the package's."""
    result = repo.run("-v", f"shipped:smoke::{CELL}", *workers, option="--compile-matrix=shipped:smoke")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*shipped:smoke::{CELL}::compiles*"])
    block = repo.block()
    assert block["matrix"]["path"] == "shipped:smoke"
    assert {cell["id"] for cell in block["cells"] if cell["status"] == "pass"} == {CELL}


def test_the_command_that_runs_it_again(repo):
    """A failure of a shipped matrix prints a command that selects that very item."""
    repo.file("conftest.py", """
        import pytest
        from pytest_torchcompile.observation import Judgement, Problem

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_finish(session):
            import pytest_torchcompile.ranks.execution as execution

            def judge_observation(observation, names, limits):
                return {name: Judgement("fail", (Problem("planted"),)) for name in names}
            execution.judge_observation = judge_observation
        """)
    result = repo.run(f"shipped:smoke::{CELL}::compiles", option="--compile-matrix=shipped:smoke")
    assert result.ret == 1
    (again,) = again_commands(result)
    assert again == ["--compile-matrix=shipped:smoke", f"shipped:smoke::{CELL}::compiles"]
    listed = repo.run(*again, "--collect-only", "-q", option="")
    listed.stdout.fnmatch_lines([f"shipped:smoke::{CELL}::compiles", "1 test collected*"])


@pytest.mark.parametrize("ini", ["", "compile_matrix = shipped:smoke"], ids=["command line", "ini file"])
def test_folders_beside_a_shipped_matrix(pytester, ini):
    """`pytest --compile-matrix=shipped:smoke tests` runs both; the ini file may name it too."""
    pytester.makeini(f"[pytest]\n{ini}\n")
    pytester.makepyfile(test_it="def test_it():\n    pass\n")
    option = "--compile-matrix" if ini else "--compile-matrix=shipped:smoke"
    result = pytester.runpytest_subprocess(option, "--collect-only", "-q", "test_it.py", "-k", f"test_it or {CELL}")
    listed = result.stdout.str()
    assert "test_it.py::test_it" in listed
    assert f"shipped:smoke::{CELL}::compiles" in listed


@pytest.fixture
def outside(tmp_path_factory) -> Path:
    """A matrix in a folder of its own, without a project file above it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    return Path(shutil.copy(shipped_path("shipped:smoke"), folder / "m.yaml"))


@pytest.mark.parametrize("args", [[], ["-n", "2"], ["test_it.py"]], ids=["alone", "xdist", "beside a test"])
def test_a_matrix_outside_the_rootdir(repo, outside, args):
    """It is collected, its node ids begin with the file's name, and they select; conftest.py beside it is not ours."""
    (outside.parent / "conftest.py").write_text("raise RuntimeError('loaded')")
    repo.file("test_it.py", "def test_it():\n    pass\n")
    option = f"--compile-matrix={outside}"
    named = [argument for argument in args if argument.startswith("test")]
    listed = repo.run("--collect-only", "-q", "-k", f"test_it or {CELL}", *named, option=option)
    assert f"m.yaml::{CELL}::compiles" in listed.stdout.lines
    result = repo.run(f"m.yaml::{CELL}", *args, option=option)
    assert result.ret == 0
    assert {cell["id"] for cell in repo.block()["cells"] if cell["status"] == "pass"} == {CELL}


@pytest.mark.parametrize("named", ["m.yaml", "../m.yaml"])
def test_a_matrix_above_the_rootdir(repo, outside, named):
    """A relative path with `..`, also where the same path selects."""
    inner = repo.path / "inner"
    inner.mkdir()
    (inner / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(outside, repo.path / "m.yaml")
    done = subprocess.run([sys.executable, "-m", "pytest", "--compile-matrix=../m.yaml", f"{named}::{CELL}",
                           "--collect-only", "-q"], cwd=inner, capture_output=True, text=True, check=False)
    assert f"m.yaml::{CELL}::compiles" in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize(("argument", "expected"), [
    ("shipped:smoke::tiny_heat", "not found: shipped:smoke::tiny_heat: the matrix has no cell 'tiny_heat'; *"),
    (f"shipped:smoke::{CELL}::compile",
     f"not found: shipped:smoke::{CELL}::compile: the matrix has no check 'compile'; did you mean 'compiles'?*"),
    (f"shipped:smoke::{CELL}::compiles::x",
     f"not found: shipped:smoke::{CELL}::compiles::x: expected MATRIX::CELL::CHECK"),
])
def test_what_a_shipped_matrix_does_not_have(pytester, argument, expected):
    """A cell or check that is not there is a usage error, as pytest's own `not found` is."""
    result = pytester.runpytest_inprocess("--compile-matrix=shipped:smoke", argument)
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: {expected}"])


def test_last_failed_knows_a_shipped_matrix(repo):
    """`--lf` selects what failed, by the same node id."""
    repo.file("conftest.py", """
        def pytest_collection_finish(session):
            import pytest_torchcompile.ranks.execution as execution
            from pytest_torchcompile.observation import Judgement, Problem

            def judge_observation(observation, names, limits):
                judged = dict.fromkeys(names, Judgement("pass"))
                return judged | {"compiles": Judgement("fail", (Problem("planted"),))}
            execution.judge_observation = judge_observation
        """)
    option = "--compile-matrix=shipped:smoke"
    assert repo.run(f"shipped:smoke::{CELL}", option=option).ret == 1
    listed = repo.run("--lf", "--collect-only", "-q", option=option)
    assert [line for line in listed.stdout.lines if "::" in line] == [f"shipped:smoke::{CELL}::compiles"]
