"""The checks `kernels` and `worth` in a matrix run: recorded where they are named, judged by limits."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
MODELS = """
class Slow(Net):
    '''Compiled it computes what it does eagerly, and takes a hundredth of a second longer.'''

def slow(graph, example_inputs):
    def run(*args):
        time.sleep(0.01)
        return graph(*args)
    return run

def wrong(graph, example_inputs):
    def run(*args):
        time.sleep(0.01)
        return [output + 1 for output in graph(*args)]
    return run
"""
FAST = """
class Slow(Net):
    def forward(self, x):
        if not torch.compiler.is_compiling():
            time.sleep(0.01)
        return super().forward(x)

def net():
    return Slow()
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [%s]
  phase: [inference]
checks: [compiles, kernels, worth]
"""


def sections(repo, cell):
    (found,) = (each for each in repo.block()["cells"] if each["id"] == cell)
    return found["observation"]["sections"]


def test_what_inductor_generated_is_recorded_and_limited(repo):
    """One fused kernel beside two library calls; a speed-up that nothing reaches is missed with certainty."""
    repo.matrix(MATRIX % "inductor" + "rules:\n  - limits: {kernels: 0, speedup: 1000}\n")
    repo.run().assert_outcomes(passed=1, failed=2)
    cell = "net-inductor-default-auto-none-inference"
    found = sections(repo, cell)
    (graph,) = found["kernels"]["graphs"]
    assert [kernel["ops"] for kernel in graph["generated"]] == [["relu"]]
    (kept,) = found["compiles"]["code"]
    ((name, key),) = kept["kernels"]
    assert name == graph["generated"][0]["name"]
    store = repo.path / ".compile-matrix" / "code"
    assert "void  kernel(" in (store / f"{key}.txt").read_text()
    assert "extern_kernels.addmm(" in (store / f"{kept['key']}.txt").read_text()
    assert found["worth"]["sides"]["compiled"]["median"] > 0
    (problem,) = repo.problems(cell, "kernels")
    assert problem["message"] == "kernels that Inductor generated: 1, at most 0 allowed"
    (problem,) = repo.problems(cell, "worth")
    assert problem["message"].endswith("at least 1000 wanted")
    assert "step, median" in problem["evidence"]


def test_a_slow_backend_fails_unless_a_limit_allows_it(repo):
    """Ten milliseconds more are seen whatever else the machine does."""
    repo.models(MODELS)
    text = (MATRIX % '"models:slow"').replace("kernels, ", "")
    repo.matrix(text)
    repo.run().assert_outcomes(passed=1, failed=1)
    (cell,) = repo.block()["cells"]
    assert cell["observation"]["sections"]["worth"]["verdict"] == "slower"
    assert cell["checks"]["worth"]["problems"][0]["message"].startswith("slower: 0.")
    repo.matrix(text + "rules:\n  - limits: {speedup: 0}\n")
    repo.run().assert_outcomes(passed=2)


def test_a_fast_backend_passes_and_says_when_it_pays(repo):
    """The model sleeps where Dynamo traces nothing of it."""
    repo.models(FAST)
    repo.matrix((MATRIX % "eager").replace("kernels, ", ""))
    repo.run().assert_outcomes(passed=2)
    (cell,) = repo.block()["cells"]
    assert cell["checks"]["worth"]["note"].startswith("faster: ")
    assert " times as fast compiled " in cell["checks"]["worth"]["note"]
    assert "; pays after " in cell["checks"]["worth"]["note"]


def test_of_wrong_numbers_nothing_else_is_said(repo):
    """Not even that they come slowly."""
    repo.models(MODELS)
    repo.matrix((MATRIX % '"models:wrong"').replace("kernels, ", "equivalence, "))
    result = repo.run()
    # What follows from them is told with them.
    result.stdout.fnmatch_lines(["=* 1 failed, 1 passed, 1 same cause in *"])
    (cell,) = repo.block()["cells"]
    assert set(cell["observation"]["sections"]["worth"]) == {"raised", "wrong"}
    (problem,) = cell["checks"]["worth"]["problems"]
    assert problem["message"].startswith("it computes wrong numbers, so its speed says nothing: ")


def test_the_old_name_is_read_and_told(repo):
    """A matrix that says `benchmark` goes on, and its header says what it is called now."""
    repo.models(FAST)
    repo.matrix((MATRIX % "eager").replace("kernels, worth", "benchmark"))
    result = repo.run()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*note: *the check 'benchmark' is called 'worth' now*"])
    (cell,) = repo.block()["cells"]
    assert "worth" in cell["checks"]


CAUSES = """
class Printing(Net):
    def forward(self, x):
        x = torch.tanh(x)
        print(end="")
        for _ in range(9):
            x = torch.tanh(x)
        time.sleep(0.05)
        return super().forward(x)

class Product(torch.nn.Module):
    def forward(self, x):
        return x @ x.t() @ x

def printing():
    return Printing()

def product():
    return Product()

def large(B):
    return torch.randn(B, 300)
"""
CAUSE_MATRIX = """
version: 1
models:
  printing: {factory: "models:printing", inputs: "models:batch", dims: {B: 4}}
  product: {factory: "models:product", inputs: "models:large", dims: {B: 300}}
axes:
  backend: ["models:slow"]
  phase: [inference]
checks: [worth]
"""


def test_planted_causes_are_named(repo):
    """Python that breaks the graph, with its line; and a backend that fuses nothing. Both are surely slower."""
    repo.models(MODELS + CAUSES)
    repo.matrix(CAUSE_MATRIX)
    repo.run()
    found = {}
    for cell in repo.block()["cells"]:
        check = cell["checks"]["worth"]
        found[cell["axes"]["model"]] = check.get("note", "") + "".join(problem["hint"] for problem in check["problems"])
    assert "of a compiled step passes in Python of the model's own, most of it in Printing." in found["printing"]
    assert "the first graph break being at models.py:" in found["printing"]
    assert "so nothing was fused" in found["product"]
