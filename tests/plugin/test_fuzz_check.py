"""The check `fuzz` in a matrix run: what it finds, how it says so, and the test that it writes."""

from __future__ import annotations

import shutil

import jsonschema
import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.report.schema import report_schema

pytestmark = pytest.mark.needs_torch
MODELS = """
class Eight(Net):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if x.shape[0] % 8 == 0 else y
"""
MATRIX = """
version: 1
models:
  eight: {factory: "models:Eight", inputs: "models:batch", dims: {B: {min: 2, max: 64}}}
axes:
  backend: [eager]
  phase: [inference]
checks: [fuzz]
"""
CELL = "eight-eager-default-auto-none-inference"


def test_the_shortest_sequence_is_reported_with_a_test_that_fails(repo):
    """The verdict names sequence, kind and culprit; the test in it, pasted into a file, fails for the same reason."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    result = repo.run("--compile-fuzz-examples=20", "--compile-fuzz-seconds=250")
    result.assert_outcomes(failed=1)
    (cell,) = repo.verdicts()
    (problem,) = repo.problems(cell.partition("::")[0], "fuzz")
    assert problem["message"].startswith("recompiles: after [call(B=2), call(B=3), call(B=8)]: 2 recompile(s) of")
    assert "models.py:" in problem["evidence"]
    repo.file("test_pasted.py", problem["evidence"][problem["evidence"].index("# test_"):])
    pasted = repo.run("test_pasted.py", option="")
    pasted.assert_outcomes(failed=1)
    pasted.stdout.fnmatch_lines(["*AssertionError: *: recompiles: 2 recompile(s) of Eight.forward, 1 explained*"])


def test_fuzz_runs_only_where_it_is_asked_for(repo):
    """A matrix without a list of checks has no fuzz items; limits of its own hold for its sequences."""
    repo.models(MODELS)
    repo.matrix(MATRIX.replace("checks: [fuzz]\n", ""))
    assert not any("::fuzz" in line for line in repo.run("--co", "-q").outlines)
    repo.matrix(MATRIX + "rules:\n  - limits: {fuzz_recompiles: 6}\n")
    repo.run("--compile-fuzz-examples=8").assert_outcomes(passed=1)


def test_a_rule_has_some_cells_fuzzed(repo, capsys):
    """The rule `also` gives them the check, in the run, in the report and to the gate; the matrix says how long."""
    repo.matrix(MATRIX.replace("models:Eight", "models:net").replace("[eager]", "[eager, aot_eager]")
                .replace("[fuzz]", "[compiles]")
                + "fuzz_seconds: 120\nrules:\n  - also: fuzz\n    when: {backend: eager}\n")
    result = repo.run("--compile-fuzz-examples=4")
    result.assert_outcomes(passed=3)
    fuzzed = "eight-eager-default-auto-none-inference"
    assert repo.verdicts() == {f"{fuzzed}::compiles": "pass", f"{fuzzed}::fuzz": "pass",
                               "eight-aot_eager-default-auto-none-inference::compiles": "pass"}
    cells = {cell["id"]: cell for cell in repo.block()["cells"]}
    assert cells[fuzzed]["planned"]["also"] == ["fuzz"]
    assert cells[fuzzed]["observation"]["sections"]["fuzz"]["rungs"][-1]["tries"] == 4
    jsonschema.validate({"compile_matrix": repo.block()}, report_schema())
    report = str(repo.path / ".compile-matrix" / "report.json")
    assert main(["gate", report]) == 0
    shutil.rmtree(repo.path / ".compile-matrix")  # a run of some checks would be taken over into the report of all
    repo.run("--compile-checks=compiles", "--compile-fuzz-examples=4").assert_outcomes(passed=2)
    capsys.readouterr()
    assert main(["gate", report]) == 2
    assert "no verdict of fuzz" in capsys.readouterr().out


def test_a_limit_of_fuzz_needs_the_check(repo):
    """A limit without its check is a mistake in the matrix."""
    repo.models(MODELS)
    repo.matrix(MATRIX.replace("[fuzz]", "[compiles]") + "rules:\n  - limits: {fuzz_recompiles: 6}\n")
    result = repo.run()
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*limit 'fuzz_recompiles' has no effect: checks leaves out 'fuzz'*"])


PICKY = """
class Even(Net):
    def forward(self, x):
        if x.shape[0] % 2:
            raise ValueError("pairs only")
        return super().forward(x)
"""


def test_what_eager_refuses_is_counted_apart(repo):
    """The report's numbers of sequences and calls are of those that ran on both sides."""
    repo.models(PICKY)
    picky = MATRIX.replace("models:Eight", "models:Even").replace("max: 64", "max: 66")  # a cell runs the middle size
    repo.matrix(picky + "rules:\n  - limits: {fuzz_recompiles: 60}\n")
    repo.run("--compile-fuzz-examples=8", "--compile-fuzz-seconds=250").assert_outcomes(passed=1)
    (rung,) = repo.block()["cells"][0]["observation"]["sections"]["fuzz"]["rungs"]
    assert 0 < rung["examples"] == rung["tries"] <= 8
    assert rung["calls"] > 0
    assert rung["refused"] > 0


def test_a_model_of_one_size_is_not_passed(repo):
    """Nothing was varied: neither by a number, nor by an expression of it, nor by a single choice."""
    repo.models("")
    repo.matrix("""
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: {choices: [4]}}}
axes:
  backend: [eager]
checks: [fuzz]
""")
    repo.run("--compile-fuzz-examples=4").assert_outcomes(failed=1)
    (problem,) = repo.problems("net-eager-default-auto-none", "fuzz")
    assert problem["message"].startswith("nothing to judge: no dim of the model has more than one size")
    assert not repo.block()["cells"][0]["observation"]["sections"]["fuzz"]["rungs"]
