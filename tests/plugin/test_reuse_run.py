"""Runs with --compile-reuse: what is unchanged is not run, whatever else is."""

from __future__ import annotations

import json
import os
import time

import jsonschema
import pytest

from pytest_torchcompile.plugin.reusing import lines_of_causes
from pytest_torchcompile.report.schema import report_schema

pytestmark = pytest.mark.needs_torch

MODELS = """
class Other(Net):
    def forward(self, x):
        return torch.tanh(super().forward(x))

def other():
    return Other()

class Reads(Net):
    def forward(self, x):
        return super().forward(x) * SIZE["scale"]

def reads():
    import json
    with open("scale.json") as file:
        SIZE.update(json.load(file))
    return Reads()

SIZE = {}

class Breaks(Net):
    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * size_of(x)

def size_of(x):
    # Each size is compiled for itself.
    return x.shape[0] if x.shape[0] == 4 else 2

def breaks():
    return Breaks()

def starts():
    import subprocess
    subprocess.run(["true"])
    return Net()
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
  other: {factory: "models:other", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager]
checks: [compiles, equivalence]
"""
NET, OTHER = "net-eager-default-auto-none", "other-eager-default-auto-none"


@pytest.fixture
def reuse(repo):
    """A repository of two models; files are older than the processes of a run."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    return repo


def run(repo, *args):
    result = repo.run("--compile-reuse", *args)
    return result, {cell["id"]: cell["reused"] for cell in repo.block()["cells"] if "reused" in cell}


def edit(repo, before, after, name="models.py"):
    path = repo.path / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    # Nobody edits and starts a run within the grain of a file system's clock.
    long_ago = time.time() - 2
    os.utime(path, (long_ago, long_ago))


def test_what_is_unchanged_is_not_run(reuse):
    """The second run has every verdict and observation of the first, and says of which run; it imports no torch.

    After an edit of one model only its cell runs, after an edit of a comment and a docstring none.
    """
    result, reused = run(reuse)
    assert result.ret == 0
    assert not reused
    result.stdout.fnmatch_lines([f"2 cells not reused: nothing was kept in {reuse.path}/* before this run: {NET}, *"])
    first = reuse.block()
    result, reused = run(reuse)
    assert result.ret == 0
    assert "not reused" not in result.stdout.str()
    result.assert_outcomes(passed=4)
    assert reused.keys() == {NET, OTHER}
    assert {origin["run"] for origin in reused.values()} == {first["run"]["started"]}
    result.stdout.fnmatch_lines(["2 cells: 2 pass; 2 ran compiled code (2 of them in an earlier run)",
                                 "2 of 2 cells reused; the oldest result is * old"])
    block = reuse.block()
    jsonschema.validate({"compile_matrix": block}, report_schema())
    for before, after in zip(first["cells"], block["cells"], strict=True):
        assert after["observation"] == before["observation"]
        assert after["checks"] == before["checks"]
    assert block["environment"] == first["environment"]

    edit(reuse, "torch.tanh(super", "torch.sin(super")
    result, reused = run(reuse)
    assert reused.keys() == {NET}
    result.stdout.fnmatch_lines([f"1 cell not reused: the code of its model changed (models): {OTHER}"])
    edit(reuse, "class Other(Net):", "class Other(Net):\n    '''A text.'''  # and a comment")
    _, reused = run(reuse)
    assert reused.keys() == {NET, OTHER}


def test_named_lines_are_told_where_they_are_today(reuse):
    """Comments above what a report names move its lines; it says what a run of today would, and nothing is run.

    Beside such a line a comment changes what the report quotes, so the cell is run.
    """
    reuse.matrix(MATRIX.replace("models:net", "models:breaks").replace("  other:", "  # other:").replace(
        "{B: 4}", "{B: {buckets: [4, 6, 5]}}").replace("equivalence]", "equivalence, graph_breaks, recompiles]")
        + "rules: [{limits: {graph_breaks: 1, recompiles: 4}, reason: shown}]\n")
    result, _ = run(reuse)
    assert result.ret == 0
    before = told_of(reuse)
    assert {place["line"] for place in before["graph_breaks"]} != {0}
    assert before["recompiles"]
    edit(reuse, "class Breaks", "# A comment.\n\n# Another.\nclass Breaks")
    edit(reuse, "# Each size", "# Each size, as one calls it,\n    # each size")
    _, reused = run(reuse)
    assert reused.keys() == {NET}
    moved = told_of(reuse)
    assert moved != before
    reuse.run()
    assert told_of(reuse) == moved
    edit(reuse, "torch._dynamo.graph_break()", "torch._dynamo.graph_break()  # here")
    result, reused = run(reuse)
    assert not reused
    result.stdout.fnmatch_lines([f"1 cell not reused: models.py:*, which its report names, is not as it was: {NET}"])


def told_of(repo):
    """What the report tells of graph breaks and recompiles, but how long they took."""
    sections = repo.block()["cells"][0]["observation"]["sections"]
    told = {"graph_breaks": sections["graph_breaks"]["graph_breaks"]}
    timed = ("seconds", "seconds_in", "guard_microseconds")
    for name, records in (("recompiles", sections["recompiles"]["recompiles"]),
                          ("compiles", sections["compiles"]["compiles"])):
        told[name] = [{key: value for key, value in each.items() if key not in timed} for each in records]
    return told


def test_reuse_is_off_unless_asked_for(reuse):
    """Without the option everything runs, whatever is kept; the key of the ini file is as good as the option."""
    reuse.matrix(MATRIX.replace("  other:", "  # other:"))
    run(reuse)
    result = reuse.run()
    assert "reused" not in result.stdout.str()
    assert not any("reused" in cell for cell in reuse.block()["cells"])
    reuse.file("pyproject.toml", "[tool.pytest.ini_options]\ncompile_reuse = true\n")
    reuse.run().stdout.fnmatch_lines(["1 of 1 cell reused*"])


def test_a_failing_cell_always_runs(reuse):
    """A failure is not kept, which the run says too."""
    reuse.matrix(MATRIX.replace("models:net", "models:fails"))
    reuse.models(f"{MODELS}\ndef fails():\n    raise ValueError('no')\n")
    for why in ("nothing was kept in * before this run", "no result is kept"):
        result, reused = run(reuse)
        assert result.ret
        assert NET not in reused
        result.stdout.fnmatch_lines([
            f"1 cell not reused: {why}; this one does not pass, and is not kept: {NET}"])
    assert reused.keys() == {OTHER}


def test_data_that_a_model_reads_is_of_the_key(reuse):
    """After an edit of the file the cell runs; where it starts a process it is never kept, and the run says why."""
    path = reuse.file("scale.json", json.dumps({"scale": 2.0}))
    os.utime(path, (time.time() - 5, time.time() - 5))
    reuse.matrix(MATRIX.replace("models:net", "models:reads").replace("models:other", "models:starts"))
    result, _ = run(reuse)
    result.stdout.fnmatch_lines([f"1 cell not reused: models.py starts a process: {OTHER}"])
    _, reused = run(reuse)
    assert reused.keys() == {NET}
    edit(reuse, "2.0", "3.0", "scale.json")
    result, reused = run(reuse)
    assert not reused
    result.stdout.fnmatch_lines([f"1 cell not reused: scale.json changed: {NET}"])


def test_an_environment_variable_is_of_the_key(reuse, monkeypatch):
    """One that no terminal and no CI sets; one of these counts if the project's code names it."""
    reuse.matrix(MATRIX.replace("  other:", "  # other:"))
    reuse.models("import os\nos.environ.get('GITHUB_NAMED')\n")
    run(reuse)
    monkeypatch.setenv("GITHUB_RUN_ID", "2")
    _, reused = run(reuse)
    assert reused
    for name in ("MY_SIZE", "GITHUB_NAMED"):
        monkeypatch.setenv(name, "2")
        result, reused = run(reuse)
        assert not reused
        result.stdout.fnmatch_lines([f"1 cell not reused: the environment variables changed ({name} is new): *"])


def test_what_changes_no_verdict_runs_nothing(reuse, monkeypatch, tmp_path):
    """The shell's variables, where caches are, a folder more in the path; also for code with a loop over ``_``."""
    reuse.models(f"{MODELS}\nfor _ in range(1):\n    pass\n")
    run(reuse)
    for name in ("_", "PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_CACHE_DIR", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(tmp_path / "other"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    _, reused = run(reuse)
    assert reused.keys() == {NET, OTHER}


def test_workers_reuse_too(reuse):
    """With xdist, also after only one of the cells has changed."""
    run(reuse)
    _, reused = run(reuse, "-n", "1")
    assert reused.keys() == {NET, OTHER}
    edit(reuse, "torch.tanh(super", "torch.sin(super")
    _, reused = run(reuse, "-n", "1")
    assert reused.keys() == {NET}


def test_reuse_needs_rank_processes(reuse):
    """In pytest's own process nobody knows what the cell has read."""
    result = reuse.run("--compile-reuse", "--compile-inprocess")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--compile-reuse needs rank processes of this machine*leave it out*"])


def test_comparisons_are_reused_where_the_code_is_the_same(reuse):
    """A model that is written otherwise is compiled and run, and not compared again; one that computes more is.

    What stays wrong, or becomes wrong while the graphs stay as they were, is found.
    """
    reuse.matrix(MATRIX.replace("equivalence]", "equivalence, gradients]"))
    _, reused = run(reuse, "--compile-reuse=code")
    assert not reused
    first = reuse.block()["cells"]
    edit(reuse, "return torch.tanh(super().forward(x))", "y = super().forward(x)\n        return torch.tanh(y)")
    result, reused = run(reuse, "--compile-reuse=code")
    assert reused.keys() == {NET, OTHER}
    assert reused[OTHER].pop("comparisons")
    assert "comparisons" not in reused[NET]
    assert reused[OTHER].keys() == reused[NET].keys()
    result.stdout.fnmatch_lines(["2 of 2 cells reused (1 compiled to the same code, and not compared again); *"])
    result.stdout.no_fnmatch_line("*not reused*")
    block = reuse.block()
    jsonschema.validate({"compile_matrix": block}, report_schema())
    for before, after in zip(first, block["cells"], strict=True):
        assert after["checks"] == before["checks"]
        assert after["observation"]["sections"]["equivalence"] == before["observation"]["sections"]["equivalence"]
    # Then nothing has changed since, and the result is as old as its comparisons.
    _, again = run(reuse, "--compile-reuse=code")
    assert again[OTHER]["run"] == reused[OTHER]["run"]
    assert "comparisons" not in again[OTHER]
    edit(reuse, "return torch.tanh(y)", "return torch.tanh(y) * (1 if torch.compiler.is_compiling() else 1.5)")
    result, reused = run(reuse, "--compile-reuse=code")
    assert reused.keys() == {NET}
    result.assert_outcomes(passed=4, failed=2)


def test_what_the_option_may_be_given(reuse):
    """A word that it does not know is a mistake; what follows it with a space is pytest's own argument."""
    result = reuse.run("--compile-reuse=cod")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--compile-reuse: 'cod' is not what can be taken of earlier runs*'code'*"])
    reuse.file("test_one.py", "def test_one():\n    pass\n")
    reuse.matrix(MATRIX.replace("  other:", "  # other:"))
    reuse.run("--compile-checks=compiles", "--compile-reuse", "test_one.py").assert_outcomes(passed=2)


def test_a_line_for_each_cause():
    """The cause of most cells first; of more than a few the number, unless all are asked for."""
    why_run = {"a-1": "data.txt changed", "b-1": "the machine changed (cores)", "b-2": "the machine changed (cores)"}
    lines = ["2 cells not reused: the machine changed (cores): b-1, b-2", "1 cell not reused: data.txt changed: a-1"]
    assert list(lines_of_causes(why_run)) == lines
    assert list(lines_of_causes(why_run, 1)) == [lines[0], "1 cell not reused for 1 other cause; -v shows them"]
    assert list(lines_of_causes(why_run, 2)) == lines
    assert list(lines_of_causes({})) == []
