"""Other pytest plugins beside us: each one works, or one sentence says what to switch off.

Each test runs pytest in a process of its own, with one of the plugins and none of the others. They are installed in
tox's environment `beside`; elsewhere these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from pytest_torchcompile.cli import main

pytestmark = pytest.mark.needs_torch
PLUGINS = {
    "randomly": "pytest_randomly", "pytest_cov": "pytest_cov", "timeout": "pytest_timeout",
    "rerunfailures": "pytest_rerunfailures", "benchmark": "pytest_benchmark", "flakefinder": "pytest_flakefinder",
    "pytest_forked": "pytest_forked",
}
"""Name, as ``-p no:NAME`` has it, to the module."""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager]
  hidden: [8, 9]
checks: [compiles, equivalence]
"""
TESTS = """
import torch

def test_counts(recompile_counter):
    compiled = torch.compile(torch.relu, backend="eager")
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    assert recompile_counter.count == 1

def test_breaks(graph_breaks):
    torch.compile(torch.relu, backend="eager")(torch.ones(3))
    assert not graph_breaks
"""
CELLS = ["net-eager-default-auto-none-hidden=8", "net-eager-default-auto-none-hidden=9"]
TESTED = {"test_net.py::test_counts": "pass", "test_net.py::test_breaks": "pass"}


@pytest.fixture
def beside(repo):
    """Run pytest with one plugin: ``beside(name, *arguments)``."""
    def run(name, *arguments, option="--compile-matrix"):
        if importlib.util.find_spec(PLUGINS[name]) is None:
            pytest.skip(f"{PLUGINS[name]} is not installed; tox's environment `beside` has it")
        others = [word for other in PLUGINS if other != name for word in ("-p", f"no:{other}")]
        return repo.run("-p", "no:cacheprovider", *others, *arguments, option=option)

    repo.matrix(MATRIX)
    repo.file("test_net.py", TESTS)
    return run


def judged(repo):
    """Cells and tests of the last run, with their verdicts."""
    block = repo.block()
    return ({cell["id"]: cell["status"] for cell in block["cells"]},
            {test["id"]: test["verdict"] for test in block["tests"]})


@pytest.mark.parametrize(("name", "arguments"), [
    ("randomly", ("-p", "randomly", "--randomly-seed=3")),
    ("randomly", ("-p", "randomly", "--randomly-seed=5", "-n", "2")),
    ("pytest_cov", ("--cov=.", "--cov-report=")),
    ("timeout", ("--timeout=300",)),
    ("rerunfailures", ("--reruns=2",)),
    ("benchmark", ()),
    ("benchmark", ("-n", "2", "-p", "no:benchmark")),
], ids=["randomly", "randomly, xdist", "cov", "timeout", "rerunfailures", "benchmark", "benchmark off, xdist"])
def test_a_run_with_it_says_the_same(beside, repo, name, arguments, capsys):
    """Cells and tests have the verdicts that they have without it, also where every warning is an error."""
    result = beside(name, "test_net.py", "-W", "error", *arguments)
    result.assert_outcomes(passed=6)
    cells, tests = judged(repo)
    assert cells == dict.fromkeys(CELLS, "pass")
    assert tests == TESTED
    for file in ("report.json", "journal.jsonl"):
        assert main(["gate", str(repo.path / ".compile-matrix" / file)]) == 0, capsys.readouterr().out


def test_reruns(beside, repo, capsys):
    """A test is run again, and its last verdict counts; a cell is run once, and its verdict stays."""
    repo.models("""
        class Breaks(Net):
            def forward(self, x):
                with open("runs.txt", "a") as file:
                    file.write("x")
                torch._dynamo.graph_break()
                return super().forward(x)
        """)
    repo.matrix(MATRIX.replace("models:net", "models:Breaks").replace("hidden: [8, 9]", "hidden: [8]")
                .replace("[compiles, equivalence]", "[graph_breaks]"))
    repo.file("test_net.py", TESTS + """
def test_wavers(recompile_counter):
    torch.compile(torch.relu, backend="eager")(torch.ones(3))
    open("tries.txt", "a").write("x")
    assert open("tries.txt").read() == "xx"
""")
    result = beside("rerunfailures", "test_net.py", "--reruns=2")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*3 rerun*"])
    cells, tests = judged(repo)
    assert cells == {"net-eager-default-auto-none-hidden=8": "fail"}
    assert tests == TESTED | {"test_net.py::test_wavers": "pass"}
    assert [test["attempts"] for test in repo.block()["tests"]] == [1, 1, 2]
    assert main(["gate", str(repo.path / ".compile-matrix" / "journal.jsonl")]) == 1, capsys.readouterr().out


def test_a_time_out_of_tests_is_none_of_cells(beside, repo):
    """A cell may take longer than pytest-timeout allows a test: --compile-timeout ends it, with its process."""
    repo.models("""
        class Slow(Net):
            def __init__(self, hidden=8):
                super().__init__(hidden)
                time.sleep(6)
        """)
    repo.matrix(MATRIX.replace("models:net", "models:Slow").replace("hidden: [8, 9]", "hidden: [8]"))
    repo.file("test_net.py", """
        import time
        import pytest

        @pytest.mark.timeout(3, func_only=True)   # what imports torch takes no interruption
        def test_hangs(recompile_counter):
            time.sleep(60)
        """)
    beside("timeout", "test_net.py", "--timeout=5").assert_outcomes(passed=2, failed=1)
    cells, tests = judged(repo)
    assert cells == {"net-eager-default-auto-none-hidden=8": "pass"}
    assert tests == {"test_net.py::test_hangs": "fail"}
    (problem,) = repo.block()["tests"][0]["problems"]
    assert problem["message"] == "Timeout (>3.0s) from pytest-timeout."


@pytest.mark.parametrize(("name", "option", "text"), [
    ("pytest_forked", "--forked",
     "ERROR: --forked ends the process of an item with it, so a cell could not be run once for all of its checks; "
     "leave it out: every cell has a process of its own"),
    ("flakefinder", "--flake-finder",
     "ERROR: --flake-finder repeats test functions, and a check of a cell is none; leave it out, or run the tests "
     "without --compile-matrix"),
])
def test_what_cannot_go_with_cells_is_refused(beside, name, option, text):
    """In one sentence, before anything runs."""
    result = beside(name, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.lines[0] == text


def test_flakefinder_repeats_tests(beside, repo):
    """Without a matrix it works: each repetition is a test of its own."""
    beside("flakefinder", "--flake-finder", "--flake-runs=2", "--json-report", option="").assert_outcomes(passed=4)
    block = repo.block(".report.json")
    assert {test["id"]: test["verdict"] for test in block["tests"]} == {
        f"{name}[{number}]": "pass" for name in TESTED for number in (0, 1)}


def test_what_is_here_is_run():
    """In tox's environment `beside` none of these tests is skipped."""
    missing = [module for module in PLUGINS.values() if importlib.util.find_spec(module) is None]
    assert not missing or os.environ.get("TOX_ENV_NAME") != "beside", f"not installed: {missing}"
    tox = (Path(__file__).parents[2] / "tox.ini").read_text(encoding="utf-8")
    for module in PLUGINS.values():
        assert f"    {module.replace('_', '-')}" in tox
