"""The checks on request that ask what compiling is worth: kernels and worth, judged from plain sections."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_torchcompile.checks import load
from pytest_torchcompile.checks.worth import _roof_lines

GRAPH = {"compile_id": "0/0", "stage": "forward", "library": {"mm": 1}, "fallbacks": {}, "generated": [
    {"name": f"cpp_fused_{k}", "language": "cpp", "ops": ["add", "relu"], "lines": [], "calls": 1} for k in range(30)]}
SIDES = {"eager": {"kernels": 30}, "compiled": {"kernels": 12}}
WORTH = {"raised": None, "wrong": "", "verdict": "faster", "speedup": 1.5, "speedup_spread": 0.02,
         "interval": [1.4, 1.6], "kernels_share": 0.4, "memory_mib": 10.0, "late_compiles": 0, "sides": SIDES,
         "compiles": 2, "cached": 0, "pays_after": 40, "text": "a table"}
SLOW = {**WORTH, "verdict": "slower", "speedup": 0.64, "interval": [0.6, 0.7], "pays_after": None}
NOISY = {**WORTH, "verdict": "could not be told", "speedup": 0.8, "interval": [0.5, 1.4], "pays_after": None}


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
    assert messages("worth", WORTH, speedup=least) == found


@pytest.mark.parametrize(("changes", "limits", "text"), [
    ({"memory_mib": 10.5}, {"memory_mib": 10}, "a compiled step takes 10.5 MiB at its peak, at most 10 allowed"),
    ({"late_compiles": 2}, {}, "2 compile(s) in the timed steps: there was no steady state"),
    ({"verdict": "nothing was compiled"}, {"speedup": 9},
     "nothing ran compiled in the timed steps, so their times say nothing"),
    ({}, {"kernels_share": 0.3}, "a compiled step runs 12 kernels and an eager one 30, which is 0.40 times as many, at "
                                 "most 0.3 allowed"),
    ({"kernels_share": None}, {"kernels_share": 0.3},
     "kernels of a step were not counted, so the limit kernels_share of 0.3 says nothing"),
    ({"wrong": "output: error is 9 times"}, {"speedup": 9, "kernels_share": 0.3, "memory_mib": 1},
     "it computes wrong numbers, so its speed says nothing: output: error is 9 times"),
])
def test_what_fails_it(changes, limits, text):
    assert messages("worth", {**WORTH, **changes}, **limits) == [text]


@pytest.mark.parametrize(("section", "limits", "found"), [
    (SLOW, {}, ["slower: 0.64 times as fast compiled (99 % interval 0.60 to 0.70)"]),
    (SLOW, {"speedup": 0.6}, []),
    (SLOW, {"speedup": 1}, ["0.64 times as fast compiled (99 % interval 0.60 to 0.70), at least 1 wanted"]),
    (NOISY, {}, []),
    (NOISY, {"speedup": 1.1}, []),
    ({**WORTH, "verdict": "no difference", "speedup": 0.99, "interval": [0.97, 1.02]}, {}, []),
])
def test_slower_fails_and_noise_does_not(section, limits, found):
    """Who asks whether it is worth it is told no; who knows it says so by a limit."""
    assert messages("worth", section, **limits) == found


def test_the_limit_that_allows_a_slow_model_is_in_the_hint():
    (problem,) = load("worth").judge(SLOW, {})
    assert problem.hint.endswith("where that is known, a rule `limits: {speedup: 0.6}` allows it")
    assert messages("worth", SLOW, speedup=0.6) == []


@pytest.mark.parametrize(("section", "text"), [
    (WORTH, "faster: 1.50 times as fast compiled (1.40 to 1.60); pays after 40 steps"),
    ({**WORTH, "cached": 1}, "faster: 1.50 times as fast compiled (1.40 to 1.60); pays after 40 steps, 1 of 2 compiles "
                             "being from a cache"),
    ({**NOISY, "others_load": "other processes kept 1.5 of 2 processors busy"},
     "could not be told: this machine is not quiet enough (other processes kept 1.5 of 2 processors busy), the "
     "speed-up lies between 0.50 and 1.40"),
    (NOISY, "could not be told: this machine is not quiet enough, the speed-up lies between 0.50 and 1.40"),
])
def test_what_a_pass_says(section, text):
    assert load("worth").remark(section) == text


@pytest.mark.parametrize(("share", "told"), [
    (0.4, "compiled it is at 40% of that roof, and 3.000 ms are left to win"),
    (1.2, "compiled it is at 100% of that roof, and 3.000 ms are left to win"),
    (1.3, "and compiled it takes 5.000 ms: its roof could not be told, because what it reads lies in caches, or less "
          "is moved than was counted"),
])
def test_what_is_said_of_the_roof(share, told):
    predicted = {"speedup": 1.0, "launch_share": 0.0, "rest_share": 0.0, "bytes_saved": 0.0, "error": 0.0}
    section = {"roof": {"seconds": 2e-3, "bound": "memory", "share": share}, "predicted": predicted,
               "sides": {"compiled": {"low": 5e-3}}}
    first, _prediction = _roof_lines(section)
    assert first.startswith("at this machine's peaks a step takes 2.000 ms, bound by memory")
    assert first.endswith(told)


def test_numbers_of_an_older_version_are_judged():
    """The check was called `benchmark`, and its sections had no kernels and no wrong numbers."""
    old = {name: value for name, value in WORTH.items() if name not in ("wrong", "kernels_share", "compiles", "cached")}
    assert messages("worth", old, speedup=1.5) == []


@pytest.mark.parametrize("check", ["kernels", "worth"])
def test_of_a_run_that_raised_there_is_nothing_to_judge(check):
    assert messages(check, {"raised": "BackendCompilerFailed"}) == [
        "nothing to judge: the compiled run raised BackendCompilerFailed"]


@pytest.mark.needs_torch
@pytest.mark.parametrize(("by_operator", "is_predicted"), [({"mm": 9e-4}, True), ({}, False)], ids=["seen", "unseen"])
def test_nothing_is_predicted_of_a_gpu_whose_operators_were_not_seen(by_operator, is_predicted, monkeypatch):
    """A model that replays CUDA graphs of its own: all of its work would pass for work that fusion can save."""
    from pytest_torchcompile.checks import worth
    from pytest_torchcompile.gauges import machine_peaks as peaks_gauge
    from pytest_torchcompile.gauges.kernels import Launches
    from pytest_torchcompile.gauges.step_parts import StepParts
    from pytest_torchcompile.gauges.step_work import OperatorWork, StepWork

    peaks = peaks_gauge.MachinePeaks("a GPU", 1e9, 1e-6, {"float32": 1e12})
    monkeypatch.setattr(peaks_gauge, "machine_peaks", lambda device: peaks)
    work = StepWork([OperatorWork("mm", "float32", 1, 10**6, 10**4, library=True)], 10**4, 10**4)
    timed = SimpleNamespace(
        work=work, parts=StepParts(1e-3, 0.0, 0, work), eager=SimpleNamespace(median=1e-3),
        compiled=SimpleNamespace(low=1e-3), speedup=1.0,
        launches={"eager": Launches(1, 0, 1, busy_seconds=9e-4, by_operator=by_operator)},
    )
    run = SimpleNamespace(
        calls=[SimpleNamespace(batch=SimpleNamespace(tensors=list))], train=False,
        compiled=SimpleNamespace(coverage=[]), cell=SimpleNamespace(axes={"mode": "default", "backend": "inductor"}),
    )
    section = worth._by_peaks(run, timed)
    assert bool(section["predicted"]) == is_predicted
    section["sides"] = {"compiled": {"low": 1e-3}}
    assert any("lets expect" in line for line in worth._roof_lines(section)) == is_predicted
