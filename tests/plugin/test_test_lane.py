"""Tests that use our fixtures are in the report: what is written, when, and what the gate makes of it."""

from __future__ import annotations

import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.report.reading import read_report

pytestmark = pytest.mark.needs_torch
CONFTEST = """
import pytest
from models import Net

@pytest.fixture
def model():
    return Net()
"""
TESTS = """
import pytest, torch
from models import batch
from pytest_torchcompile import compile_shapes, dim

pytestmark = []
eager = pytest.mark.compile_modes(backend="eager")

@eager
@pytest.mark.compile_limits(recompiles=1)
def test_holds(compiled_model):
    for rows in (3, 5, 7):
        compiled_model(batch(rows))

@eager
@pytest.mark.compile_limits(recompiles=0)
def test_over(compiled_model):
    for rows in (3, 5):
        compiled_model(batch(rows))

@eager
@compile_shapes(B=dim(2, 6), inputs=batch)
def test_fuzzed(compiled_model, batches):
    for x in batches:
        compiled_model(x)

@pytest.mark.skip(reason="no such machine")
def test_skipped(compiled_model):
    pass

@pytest.mark.xfail(reason="a known fault")
def test_known(graph_breaks):
    assert len(graph_breaks)

@pytest.mark.xfail(reason="was a fault", strict=True)
def test_mended(graph_breaks):
    pass

@pytest.mark.xfail(reason="now and then", strict=False)
def test_wavering(graph_breaks):
    pass

@pytest.fixture
def broken():
    raise OSError("no disk")

def test_set_up(graph_breaks, broken):
    pass

@pytest.fixture
def messy():
    yield
    raise OSError("no broom")

def test_torn_down(graph_breaks, messy):
    pass

def test_not_ours():
    assert False
"""
VERDICTS = {
    "test_holds[default-eager]": "pass", "test_over[default-eager]": "fail", "test_fuzzed[default-eager]": "pass",
    "test_skipped": "skip", "test_known": "xfail", "test_mended": "xpass", "test_wavering": "pass",
    "test_set_up": "error", "test_torn_down": "error",
}
ONE = """
import torch

def test_it(recompile_counter):
    torch.compile(torch.relu, backend="eager")(torch.ones(3))
    assert len(recompile_counter.compiles) == 1
"""


@pytest.fixture
def scored(repo):
    repo.file("conftest.py", CONFTEST)
    repo.file("test_scorer.py", TESTS)
    return repo


def by_name(repo, name="report.json"):
    return {test["id"].removeprefix("test_scorer.py::"): test for test in repo.block(name)["tests"]}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_every_verdict(scored, workers, capsys):
    """A run without a matrix: no cells, but every test of ours with its ledger, limits and verdict."""
    scored.run("--json-report", "--json-report-file=report.json", "--compile-fuzz-examples=3", *workers, option="")
    found = by_name(scored)
    assert {name: test["verdict"] for name, test in found.items()} == VERDICTS
    block = scored.block("report.json")
    assert block["tests_planned"] == [test["id"] for test in block["tests"]]
    assert block["cells"] == []
    assert block["environment"]["torch"]
    assert block["finished"]
    held = found["test_holds[default-eager]"]
    assert held["counts"] | {"graphs": 2, "runs": 3} == held["counts"]
    assert (held["counts"]["compiles"], held["counts"]["recompiles"], held["limits"]) == (2, 1, {"recompiles": 1})
    assert held["model"] == {"called": True, "ran": True}
    assert held["asks_model"]
    assert held["ledger"]["recompiles"][0]["cause"] == "shape"
    (problem,) = found["test_over[default-eager]"]["problems"]
    assert problem["message"] == "compile_limits: 1 recompile, none allowed"
    assert (problem["file"], problem["line"]) == ("test_scorer.py", 15)
    assert found["test_fuzzed[default-eager]"]["sequences"] >= 3
    assert found["test_fuzzed[default-eager]"]["counts"]["runs"] >= 1
    assert found["test_skipped"]["note"] == "no such machine"
    assert found["test_known"]["note"] == "a known fault"
    assert found["test_wavering"]["note"] == "expected to fail, and passed: now and then"
    assert found["test_set_up"]["problems"][0]["message"] == "in its setup: OSError: no disk"
    assert found["test_torn_down"]["problems"][0]["message"] == "in its teardown: OSError: no broom"
    assert main(["gate", str(scored.path / "report.json")]) == 1
    told = capsys.readouterr().out
    assert "test_scorer.py::test_over[default-eager]" in told
    assert "compile_limits: 1 recompile, none allowed" in told
    assert "no policy allows it: no such machine" in told
    assert "contradict" not in told


def test_nobody_asked(scored):
    """A plain run of such tests writes nothing."""
    result = scored.run("-k", "known", "-p", "no:cacheprovider", option="")
    result.assert_outcomes(xfailed=1, deselected=9)
    assert not (scored.path / ".compile-matrix").exists()
    assert not list(scored.path.rglob("*.json*"))


def test_a_run_without_a_test_of_ours(repo):
    """Its JSON report is pytest-json-report's alone."""
    repo.file("test_plain.py", "def test_plain():\n    pass\n")
    repo.file("conftest.py", """
        import sys

        def pytest_unconfigure():
            open("loaded.txt", "w").write(str([name for name in ("torch", "yaml") if name in sys.modules]))
        """)
    repo.run_anew("--json-report", "--json-report-file=report.json").assert_outcomes(passed=1)
    assert "compile_matrix" not in (repo.path / "report.json").read_text()
    assert (repo.path / "loaded.txt").read_text() == "[]"


def test_beside_a_matrix(repo, capsys):
    """One block has both; the journal, which is all that a kill leaves, has the same tests."""
    repo.file("test_one.py", ONE)
    assert repo.run("test_one.py").ret == 0
    (test,) = repo.block()["tests"]
    assert (test["id"], test["verdict"], test["counts"]["runs"]) == ("test_one.py::test_it", "pass", 1)
    assert len(repo.block()["cells"]) == 1
    journal = read_report(repo.path / ".compile-matrix" / "journal.jsonl")
    assert journal.block["tests"] == [test]
    main(["gate", str(repo.path / ".compile-matrix" / "report.json")])
    assert "1 test: 1 pass; 1 ran compiled code" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_test_that_is_deselected_does_not_vanish(repo, capsys, workers):
    """It is kept as the run before found it; where no run has it, the gate tells that it was not run."""
    repo.file("test_one.py", ONE + "\ndef test_other(recompile_counter):\n    pass\n")
    report = str(repo.path / ".compile-matrix" / "report.json")
    given = ["test_one.py", "--compile-checks=compiles", "-n", workers]
    assert repo.run(*given, "--deselect", "test_one.py::test_it").ret == 0
    assert repo.block()["run"]["tests_deselected"] == ["test_one.py::test_it"]
    note = "note      1 test that uses our fixtures was deselected and not run: test_one.py::test_it"
    assert note in told(report, capsys)
    journal = read_report(repo.path / ".compile-matrix" / "journal.jsonl").block
    assert journal["run"]["tests_deselected"] == ["test_one.py::test_it"]
    assert repo.run(*given, "-k", "compiles or test_it").ret == 0
    block = repo.block()
    assert {test["id"] for test in block["tests"]} == {"test_one.py::test_it", "test_one.py::test_other"}
    assert [each["tests"] for each in block["tests_kept"]] == [["test_one.py::test_other"]]
    assert "tests_deselected" not in block["run"]
    assert "verdicts of an earlier run" in told(report, capsys)


def told(report, capsys):
    """What the gate says of a report."""
    capsys.readouterr()
    main(["gate", report])
    return capsys.readouterr().out


def test_a_process_that_dies_is_a_crash_of_its_test(repo):
    """Under xdist the others go on, and the report tells which test it was."""
    repo.file("test_dies.py", """
        import os

        def test_ours_dies(recompile_counter):
            os._exit(3)

        def test_ours_lives(recompile_counter):
            pass

        def test_plain_dies():
            os._exit(3)
        """)
    repo.run("--json-report", "--json-report-file=report.json", "-n", "1", option="")
    assert {test["id"]: test["verdict"] for test in repo.block("report.json")["tests"]} == {
        "test_dies.py::test_ours_dies": "crash", "test_dies.py::test_ours_lives": "pass"}
    (problem,) = repo.block("report.json")["tests"][0]["problems"]
    assert problem["message"] == "the process that ran this test died"
    assert "crashed while running" in problem["evidence"]


def test_what_was_planned_and_never_ran(repo, capsys):
    repo.file("test_two.py", ONE + "\ndef test_other(recompile_counter):\n    pass\n")
    repo.file("test_a.py", "def test_fails():\n    assert False\n")
    repo.run("-x", "--json-report", "--json-report-file=report.json", option="")
    assert {test["id"]: test["verdict"] for test in repo.block("report.json")["tests"]} == {
        "test_two.py::test_it": "not_run", "test_two.py::test_other": "not_run"}
    assert main(["gate", str(repo.path / "report.json")]) == 2
    assert "2 planned tests were not run: test_two.py::test_it, test_two.py::test_other" in capsys.readouterr().out


def test_a_killed_run_leaves_no_old_green(repo, capsys):
    """What the run before has left is marked at the start; a mistake on the command line comes after that, too."""
    repo.file("test_one.py", ONE + "\ndef test_kill():\n    import os\n    if 'KILL' in os.environ:\n"
                                   "        os.kill(os.getpid(), 9)\n")
    arguments = ("--json-report", "--json-report-file=report.json")
    repo.run(*arguments, option="").assert_outcomes(passed=2)
    green = (repo.path / "report.json").read_bytes()
    assert main(["gate", str(repo.path / "report.json")]) == 0
    for more, variable in ((), "KILL"), (("--no-such-option",), "UNUSED"):
        (repo.path / "report.json").write_bytes(green)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, "1")
            repo.run(*arguments, *more, option="")
        capsys.readouterr()
        assert main(["gate", str(repo.path / "report.json")]) == 2
        assert "is of an earlier" in capsys.readouterr().out


def test_what_only_lists_tests_marks_nothing(repo):
    repo.file("report.json", '{"compile_matrix": {}}')
    repo.file("test_plain.py", "def test_plain():\n    pass\n")
    repo.run("--json-report", "--json-report-file=report.json", "--markers", option="")
    assert (repo.path / "report.json").read_text() == '{"compile_matrix": {}}'


WRONG_NUMBERS = """
import pytest, torch
from models import Net, batch
from pytest_torchcompile import CompileConfig, assert_equivalent, compare

def one_percent_off(graph, inputs):
    return lambda *args: [1.01 * out if isinstance(out, torch.Tensor) else out for out in graph(*args)]

def other_strides(graph, inputs):
    return lambda *args: [out.t().contiguous().t() for out in graph(*args)]

def test_holds(recompile_counter):
    torch.compile(Net(), backend="eager")(batch(4))

def compared(backend):
    return compare(Net(), [batch(4)], CompileConfig(backend=backend), train=False)

def test_assert_equivalent(recompile_counter):
    assert_equivalent(Net(), [batch(4)], CompileConfig(backend=one_percent_off), train=False)

def test_said(recompile_counter):
    found = compared(one_percent_off)
    assert found.ok, str(found)

def test_unsaid(recompile_counter):
    assert compared(one_percent_off).ok

def test_close(recompile_counter):
    torch.testing.assert_close(torch.compile(torch.sin, backend=one_percent_off)(batch(4)), torch.sin(batch(4)))

def test_allclose(recompile_counter):
    assert torch.allclose(batch(4), 1.01 * batch(4) + 1)

@pytest.fixture
def checked(recompile_counter):
    assert_equivalent(Net(), [batch(4)], CompileConfig(backend=one_percent_off), train=False)

def test_set_up(checked):
    pass

def test_strides(recompile_counter):
    found = compared(other_strides)
    assert found.ok, str(found)

def test_no_graph(recompile_counter):
    assert compared("eager").ok is False, "a count"
"""
POLICY = """
version: 1
allowed_failures:
  - {tests: "test_wrong.py::*", verdicts: [fail, error], reason: known, issue: "1", until: 9999-01-01}
"""


def test_an_allowance_excuses_no_wrong_numbers_in_a_test(repo):
    """However the test compares; what is wrong in strides, or in a count, it does excuse."""
    repo.file("test_wrong.py", WRONG_NUMBERS)
    repo.run("--json-report", "--json-report-file=report.json", option="")
    told = {}
    for name, test in by_name(repo).items():
        told[name.removeprefix("test_wrong.py::")] = "".join(problem["message"] for problem in test["problems"])
    assert told["test_assert_equivalent"].startswith("AssertionError: not equivalent (wrong numbers): ")
    assert told["test_set_up"].startswith("in its setup: AssertionError: not equivalent (wrong numbers): ")
    assert "0x" not in told["test_allclose"]
    reports = [read_report(repo.path / "report.json")]
    findings = gate(reports, parse_policy(POLICY.encode(), "release.yaml")).findings
    failing = {cell for finding in findings if finding.weight == "fail" for cell in finding.cells}
    excused = {name for name in told if f"test_wrong.py::{name}" not in failing}
    assert excused == {"test_holds", "test_strides", "test_no_graph"}, told
    (known,) = POLICY.strip().splitlines()[-1:]
    both = POLICY + known.replace("reason:", "checks: equivalence, reason:")
    assert gate(reports, parse_policy(both.encode(), "release.yaml")).code == 0


def test_an_xfail_excuses_no_wrong_numbers_in_a_test(repo, capsys):
    """Pytest's own marker names no check. Where nothing ran it is a skip; where a policy names the check it holds."""
    marked = (
        WRONG_NUMBERS
        + """
@pytest.mark.xfail(reason="kills the machine", run=False)
def test_never(recompile_counter):
    pass

pytestmark = pytest.mark.xfail(reason="flaky")
"""
    )
    repo.file("test_wrong.py", marked)
    repo.run_anew("--json-report", "--json-report-file=report.json").assert_outcomes(xpassed=1, xfailed=9)
    verdicts = {
        test["id"].removeprefix("test_wrong.py::"): test["verdict"] for test in repo.block("report.json")["tests"]
    }
    assert (verdicts["test_close"], verdicts["test_strides"], verdicts["test_never"]) == ("xfail", "xfail", "skip")
    report = str(repo.path / "report.json")
    text = told(report, capsys)
    assert "an xfail of pytest names no check, so the gate hides no wrong numbers by it" in text
    assert "1 of 10 tests was skipped, and no policy allows it: kills the machine" in text
    outcome = gate([read_report(repo.path / "report.json")])
    failing = {name.removeprefix("test_wrong.py::") for name, test in outcome.tests.items() if test.status == "fail"}
    assert failing == set(verdicts) - {"test_holds", "test_strides", "test_no_graph", "test_never"}
    (known,) = POLICY.strip().splitlines()[-1:]
    skips = '\nallowed_skips: [{tests: "*test_never", reason: r}]\n'
    both = POLICY.replace(known, known.replace("reason:", "checks: equivalence, reason:")) + skips
    repo.file("release.yaml", both)
    assert main(["gate", report, "--policy", str(repo.path / "release.yaml")]) == 0


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan"])
def test_a_test_whose_body_is_not_run_has_not_passed(repo, option, capsys):
    """Although its set-up has run compiled code, and pytest ends with 0."""
    repo.file("test_one.py", """
        import pytest, torch

        @pytest.fixture
        def output(recompile_counter):
            return torch.compile(torch.relu, backend="eager")(torch.ones(3))

        def test_it(output):
            assert False
        """)
    repo.run(option, "--json-report", "--json-report-file=report.json", option="")
    assert [test["verdict"] for test in repo.block("report.json")["tests"]] == ["not_run"]
    assert "1 planned test was not run: test_one.py::test_it" in told(str(repo.path / "report.json"), capsys)
    assert main(["gate", str(repo.path / "report.json")]) == 2
