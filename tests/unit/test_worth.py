"""The checks on request that ask what compiling is worth: kernels and benchmark, judged from plain sections."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import load

GRAPH = {"compile_id": "0/0", "stage": "forward", "library": {"mm": 1}, "fallbacks": {}, "generated": [
    {"name": f"cpp_fused_{k}", "language": "cpp", "ops": ["add", "relu"], "lines": [], "calls": 1} for k in range(30)]}
BENCHMARK = {"raised": None, "verdict": "faster", "speedup": 1.5, "speedup_spread": 0.02, "interval": [1.4, 1.6],
             "memory_mib": 10.0, "late_compiles": 0, "sides": {}, "text": "a table"}


def messages(check, section, **limits):
    return [problem.message for problem in load(check).judge(section, limits)]


@pytest.mark.parametrize(("limit", "found"), [
    (None, []), (30, []), (29, ["kernels that Inductor generated: 30, at most 29 allowed"]),
])
def test_kernels(limit, found):
    """At the limit is within it; without one they are only recorded."""
    limits = {} if limit is None else {"kernels": limit}
    section = {"raised": None, "graphs": [GRAPH]}
    assert messages("kernels", section, **limits) == found
    for problem in load("kernels").judge(section, limits):
        lines = problem.evidence.splitlines()
        assert lines[0] == "graph 0/0 (forward): cpp_fused_0: add, relu"
        assert lines[-1] == "and 10 more"
        assert len(lines) == 21


def test_a_limit_of_kernels_where_there_are_none_says_nothing():
    """aot_eager generates none, which is not few."""
    section = {"raised": None, "graphs": []}
    assert messages("kernels", section) == []
    assert messages("kernels", section, kernels=3) == [
        "Inductor generated nothing, so the limit of 3 kernels says nothing"]


@pytest.mark.parametrize(("least", "found"), [
    (1.0, []), (1.5, []), (1.6, []),
    (1.61, ["1.50 times as fast compiled (99 % interval 1.40 to 1.60), at least 1.61 wanted"]),
])
def test_only_a_speedup_that_is_surely_too_small_fails(least, found):
    """All of the interval has to lie below what is wanted."""
    assert messages("benchmark", BENCHMARK, speedup=least) == found


@pytest.mark.parametrize(("changes", "limits", "text"), [
    ({"memory_mib": 10.5}, {"memory_mib": 10}, "a compiled step takes 10.5 MiB at its peak, at most 10 allowed"),
    ({"late_compiles": 2}, {}, "2 compile(s) in the timed steps: there was no steady state"),
    ({"verdict": "nothing was compiled"}, {"speedup": 9},
     "nothing ran compiled in the timed steps, so their times say nothing"),
])
def test_what_fails_a_benchmark(changes, limits, text):
    assert messages("benchmark", {**BENCHMARK, **changes}, **limits) == [text]


def test_a_slow_model_without_a_limit_is_only_recorded():
    slow = {**BENCHMARK, "verdict": "slower", "speedup": 0.5, "interval": [0.4, 0.6]}
    assert messages("benchmark", slow) == []


@pytest.mark.parametrize("check", ["kernels", "benchmark"])
def test_of_a_run_that_raised_there_is_nothing_to_judge(check):
    assert messages(check, {"raised": "BackendCompilerFailed"}) == [
        "nothing to judge: the compiled run raised BackendCompilerFailed"]
