"""The checks `kernels` and `benchmark` in a matrix run: recorded where they are named, judged by limits."""

from __future__ import annotations

MODELS = """
class Slow(Net):
    '''Compiled it computes what it does eagerly, and takes a hundredth of a second longer.'''

def slow(graph, example_inputs):
    def run(*args):
        time.sleep(0.01)
        return graph(*args)
    return run
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [%s]
  phase: [inference]
checks: [compiles, kernels, benchmark]
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
    assert found["benchmark"]["sides"]["compiled"]["median"] > 0
    (problem,) = repo.problems(cell, "kernels")
    assert problem["message"] == "kernels that Inductor generated: 1, at most 0 allowed"
    (problem,) = repo.problems(cell, "benchmark")
    assert problem["message"].endswith("at least 1000 wanted")
    assert "step, median" in problem["evidence"]


def test_a_slow_backend_is_told_and_fails_only_by_a_limit(repo):
    """Ten milliseconds more are seen whatever else the machine does."""
    repo.models(MODELS)
    text = (MATRIX % '"models:slow"').replace("kernels, ", "")
    repo.matrix(text)
    repo.run().assert_outcomes(passed=2)
    repo.matrix(text + "rules:\n  - limits: {speedup: 0.9}\n")
    repo.run().assert_outcomes(passed=1, failed=1)
    (cell,) = repo.block()["cells"]
    assert cell["observation"]["sections"]["benchmark"]["verdict"] == "slower"
