"""Judging an observation, and applying an xfail rule to what came of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_torchcompile.checks import CHECKS, load
from pytest_torchcompile.observation import Failure, Judgement, Observation, Problem, worst
from pytest_torchcompile.verdicts import apply_xfail, judge


def section(**changes):
    """A section of `compiles` in which all is well, with changes."""
    return {"compiles": [], "graphs": [{"runs": 2}], "eager_frames": [], "lost": [], "coverage": [
        {"call": "call 1", "share": 1.0, "total": 4, "outside": 0, "sites": []}],
        "all_zero": [False], "eager_all_zero": [False], "error": None, "seconds": 1.0} | changes


FRAME = {"function": "forward", "file": "m.py", "line": 3, "reason": "why", "kind": "limit"}
ERROR = {"type": "InductorError", "text": "no", "phase": "forward", "traceback": "at line 1"}


@pytest.mark.parametrize(("changes", "text"), [
    ({"graphs": []}, "nothing was compiled: no graph reached the backend"),
    ({"graphs": [{"runs": 0}]}, "graphs were compiled, but none was ever executed"),
    ({"eager_frames": [FRAME]}, "1 frame(s) silently ran eagerly: limit"),
    ({"coverage": [{"call": "call 2 (B=1)", "share": 0.5, "total": 4, "outside": 2, "sites": ["m.py:3"]}]},
     "only 50% of the model's operator calls ran inside compiled graphs at call 2 (B=1), 100% wanted "
     "(2 of 4 ran eagerly)"),
    ({"lost": ["a record of a kind that is unknown"]}, "can't vouch for this cell"),
    ({"all_zero": [True], "eager_all_zero": [True]}, "their equality proves nothing"),
    ({"all_zero": [True]}, "every output of the compiled model is zero, NaN or infinite"),
    ({"error": ERROR}, "the compiled run raised InductorError in forward; eager did not"),
])  # fmt: skip
def test_nothing_vacuous_passes(changes, text):
    """Each way in which a compiled run can be vacuous is a problem of the check `compiles`."""
    (problem,) = load("compiles").judge(section(**changes), {})
    assert text in problem.message


def test_a_good_section_passes():
    """The section that the tests above change has no problem itself."""
    assert not list(load("compiles").judge(section(), {}))


def test_a_lower_coverage_can_be_allowed():
    """The limit `coverage` is the smallest share that passes."""
    low = section(coverage=[{"call": "call 1", "share": 0.5, "total": 4, "outside": 2, "sites": []}])
    assert not list(load("compiles").judge(low, {"coverage": 0.5}))
    assert list(load("compiles").judge(low, {"coverage": 0.51}))


def test_silent_frames_are_a_problem_for_each_place():
    """So that what two functions do is not told as one; the coverage that comes of it is not told."""
    frames = [{"kind": "limit", "function": f"M.{name}", "file": "m.py", "line": line, "reason": "8 entries"}
              for name, line in (("f", 3), ("g", 9), ("g", 9))]
    low = [{"call": "call 1", "share": 0.5, "total": 4, "outside": 2, "sites": []}]
    found = list(load("compiles").judge(section(eager_frames=frames, coverage=low), {}))
    assert [(p.message, p.file, p.line) for p in found] == [
        ("1 frame(s) silently ran eagerly: limit in M.f", "m.py", 3),
        ("2 frame(s) silently ran eagerly: limit in M.g", "m.py", 9)]


def test_fuzz_passes_no_model_of_one_size():
    """Sequences of shapes that are all the same prove nothing of shapes."""
    (same,) = load("fuzz").judge({"varied": [], "rungs": [], "finding": None}, {})
    assert same.message == ("nothing to judge: no dim of the model has more than one size, so no sequences of shapes "
                            "differ")
    assert same.hint.startswith("give a dim a range, like {min: 1, max: 64}, or leave the model's cells out: -m \"not ")
    assert not list(load("fuzz").judge({"varied": ["B"], "rungs": [{"tries": 3, "spent": ""}], "finding": None}, {}))


EMPTY = {
    "shape_stability": {"calls": 0, "late": [], "between": []},
    "smoketest": {"ok": False, "reason": "nothing was compiled", "phase": "forward"},
    "safe_fallback": {"error": "", "met": [False, False]},
    "cudagraphs": {"steps": [], "skips": []},
    "kernels": {"graphs": []},
    "benchmark": {"verdict": "nothing was compiled", "text": ""},
    "fuzz": {"rungs": [{"tries": 0}], "finding": None},
}
"""Sections of checks that have a form of their own, of a run in which nothing was compiled."""


@pytest.mark.parametrize("name", [n for n in CHECKS if n not in ("safe_fallback", "fuzz")])  # these run on their own
def test_no_check_passes_a_run_that_raised(name):
    """Where the compiled run raised, every check fails: nothing was seen, so nothing is good."""
    nothing = {"raised": "InductorError", "graphs": 0, "graph_breaks": [], "recompiles": [], "sizes": 1,
               "dynamic": "auto", "compared": 0, "leaves": [], "nonzero": 1, "steps": 3}
    problems = list(load(name).judge(section(error=ERROR, graphs=[]) if name == "compiles" else nothing, {}))
    assert problems


@pytest.mark.parametrize("name", [n for n in CHECKS if n != "compiles"])
def test_no_check_passes_a_run_that_saw_nothing(name):
    """Nor does one where nothing was compiled or compared."""
    nothing = {"raised": None, "graphs": 0, "graph_breaks": [], "recompiles": [], "sizes": 1, "dynamic": "auto",
               "compared": 0, "leaves": [], "nonzero": 0, "steps": 3, **EMPTY.get(name, {})}
    assert list(load(name).judge(nothing, {"kernels": 1}))  # which are only recorded without a limit


def test_fuzz_tells_want_of_time_from_sizes_that_eager_refuses():
    """Either way nothing was compared, and what to do is another thing."""
    rungs = [{"backend": "eager", "tries": 4, "refused": 2}, {"backend": "inductor", "tries": 0, "refused": 7}]
    (refused,) = load("fuzz").judge({"rungs": rungs, "finding": None}, {})
    assert refused.message == ("nothing was compared with the backend inductor: eager refuses all 7 call(s) that were "
                               "drawn")
    assert refused.hint == "narrow the model's dims to the sizes that it takes"
    (both,) = load("fuzz").judge({"rungs": [{"tries": 0, "refused": 7, "mute": 2}], "finding": None}, {})
    assert both.message.endswith("all 7 call(s) that were drawn, or gives nothing but zeros, NaN or rounding noise: 2")
    (mute,) = load("fuzz").judge({"rungs": [{"tries": 0, "refused": 0, "mute": 3}], "finding": None}, {})
    assert mute.message == ("nothing is proved: in all 3 call(s) that were drawn the model gives nothing but zeros, "
                            "NaN or rounding noise")
    (impossible,) = load("fuzz").judge({"rungs": [{"tries": 0, "spent": "sizes"}], "finding": None}, {})
    assert impossible.message == "no sequence was run: no sizes were found that the dims' expressions go with"
    (late,) = load("fuzz").judge({"rungs": [{"tries": 0, "refused": 0}], "finding": None}, {})
    assert late.message == "no sequence was run: the time for fuzzing was over before the first"


@pytest.mark.parametrize(("name", "section"), [
    # the first rung has used up the budget: nothing was run with the cell's own backend
    ("fuzz", {"rungs": [{"backend": "eager", "tries": 9}, {"backend": "inductor", "tries": 0}], "finding": None}),
    ("fuzz", {"rungs": [], "finding": None}),
    # every drawn call was refused by eager
    ("fuzz", {"rungs": [{"backend": "eager", "tries": 0, "refused": 9}], "finding": None}),
    # both sides raised, or gave nothing that can be compared
    ("randomness", {"raised": None, "random": False, "seeds": 4, "graphs": 1, "compared": 1, "wrong": []}),
    # one size replays, and of the other nothing ran compiled
    ("cudagraphs", {"raised": None, "functions": {}, "skips": [], "steps": [
        {"call": "call 1", "graphs": [{"compile_id": "0/0", "replays": 1}], "elsewhere": 0, "backwards": 0,
         "without": []},
        {"call": "call 2", "graphs": [], "elsewhere": 0, "backwards": 0, "without": []}]}),
])
def test_no_check_passes_what_it_saw_in_part(name, section):
    """Where the part that counts was not run, nothing is good."""
    assert list(load(name).judge(section, {}))


@pytest.mark.parametrize(("backend", "advice"), [
    ("inductor", "; `torch._inductor.config.fallback_random = True` has it draw eager's own"),
    ("aot_eager", "; this backend runs torch's own operators, so look at what changes the graph before it"),
    ("m:mine", "; look at what the backend 'm:mine' makes of them; where it goes on to Inductor, `torch._inductor."
               "config.fallback_random = True` has it draw eager's own"),
])
def test_advice_about_random_numbers_is_for_the_backend(backend, advice):
    """Inductor's setting is no use to others."""
    section = {"raised": None, "backend": backend, "random": True, "seeds": 64, "graphs": 1, "compared": 3,
               "wrong": ["mean of output: is 3, expected 2"]}
    (found,) = load("randomness").judge(section, {})
    assert found.hint == f"the compiled code draws its random numbers in another way than eager{advice}"


@pytest.mark.parametrize(("dynamic", "sizes", "allowed"), [
    ("static", 3, 2), ("static", 1, 0), ("auto", 3, 1), ("auto", 1, 0), ("dynamic", 3, 0),
])  # fmt: skip
def test_recompiles_that_shapes_explain(dynamic, sizes, allowed):
    """Without a limit in the matrix, no function may recompile more often than its shapes explain."""
    def found(count):
        one = {"function": "forward", "file": "m.py", "line": 3, "compile_id": "0/1", "kind": "recompile",
               "cause": "shape", "reason": "size mismatch", "what": "x.size(0)", "expected": "4", "actual": "8",
               "during": "call 2"}
        return {"raised": None, "graphs": 1, "recompiles": [one] * count, "sizes": sizes, "dynamic": dynamic}

    check = load("recompiles")
    assert not list(check.judge(found(allowed), {}))
    (problem,) = check.judge(found(allowed + 1), {})
    assert problem.message == (f"{allowed + 1} recompile(s), {allowed} explained by {sizes} size(s) "
                               f"with dynamic={dynamic}")
    assert "call 2: forward m.py:3  shape: x.size(0)  4 -> 8" in problem.evidence
    assert "mark_dynamic" in problem.hint


def test_a_section_that_is_missing_is_an_error():
    """A check that was not measured is never a pass."""
    assert judge(Observation("c"), ["compiles"], {})["compiles"].verdict == "error"


@pytest.mark.parametrize(("kind", "verdict"), [
    ("skip", "skip"), ("crash", "crash"), ("timeout", "timeout"), ("user", "error"), ("usage", "error"),
    ("internal", "error"),
])  # fmt: skip
def test_failures(kind, verdict):
    """What kept a run from having a result becomes the verdict of each check."""
    found = judge(Observation("c", failure=Failure(kind, "why")), ["compiles", "equivalence"], {})
    assert {j.verdict for j in found.values()} == {verdict}


def planned(checks=()):
    return SimpleNamespace(outcome="xfail", checks=checks, reason="known", issue="a/b#1", rule="m.yaml:3")


def judged(**verdicts):
    return {name: Judgement(v, () if v == "pass" else (Problem("p"),)) for name, v in verdicts.items()}


@pytest.mark.parametrize(("before", "checks", "after"), [
    ({"a": "fail", "b": "pass"}, (), {"a": "xfail", "b": "pass"}),
    ({"a": "pass", "b": "pass"}, (), {"a": "xpass", "b": "xpass"}),
    ({"a": "fail", "b": "pass"}, ("b",), {"a": "fail", "b": "xpass"}),
    ({"a": "crash", "b": "crash"}, (), {"a": "xfail", "b": "xfail"}),
    ({"a": "error", "b": "error"}, (), {"a": "error", "b": "error"}),
    ({"a": "skip", "b": "skip"}, (), {"a": "skip", "b": "skip"}),
])  # fmt: skip
def test_xfail(before, checks, after):
    """Strict: an expected failure that did not come fails; an error or a skip is never an expected failure."""
    found = apply_xfail(judged(**before), planned(checks))
    assert {name: j.verdict for name, j in found.items()} == after


def test_an_incomplete_selection_proves_no_unexpected_pass():
    """Where -k left checks of the cell out, the ones that ran may pass."""
    assert apply_xfail(judged(a="pass"), planned(), complete=False)["a"].verdict == "pass"


def test_worst():
    """A cell is as bad as its worst check."""
    assert worst(["pass", "xfail", "pass"]) == "xfail"
    assert worst(["fail", "crash"]) == "crash"
    assert worst([]) == "not_run"


# the checks of the production layer


SMOKETEST = {"raised": None, "ok": True, "reason": "2 step(s) ran", "phase": "", "step": 0, "seconds": 1.0, "graphs": 2,
             "compiles": 0, "evidence": "", "notes": []}


@pytest.mark.parametrize(("changes", "message", "evidence"), [
    ({"raised": "InductorError"}, "nothing to judge: the compiled run raised InductorError", ""),
    ({"ok": False, "reason": "output: error is 9", "phase": "comparison", "step": 2, "evidence": "at line 1"},
     "the smoketest says False: output: error is 9 (step 2, comparison)", "at line 1"),
    ({"ok": False, "reason": "nothing was compiled", "phase": "forward"},
     "the smoketest says False: nothing was compiled (forward)", ""),
    ({"compiles": 3}, "3 compile(s) in the smoketest of a model that was warm", ""),
    ({"ok": False, "reason": "no", "phase": "state", "compiles": 3}, "the smoketest says False: no (state)", ""),
])  # fmt: skip
def test_the_smoketest_of_a_cell(changes, message, evidence):
    """One problem for each: the run, what the smoketest says, what it compiled."""
    judge_it = load("smoketest").judge
    assert not list(judge_it(SMOKETEST, {}))
    (problem,) = judge_it(SMOKETEST | changes, {})
    assert (problem.message, problem.evidence) == (message, evidence)
    assert ("an optimiser's step or another seed" in problem.hint) is message.startswith("3 compile")


FALLBACK = {"error": None, "original": True, "changed": [], "differs": [], "met": [1, 2],
            "log": ["fallback_eager", "fallback_eager"]}


@pytest.mark.parametrize(("changes", "message", "evidence"), [
    ({"error": "RuntimeError: no"}, "maybe_compile let a failure of the compiler through: RuntimeError: no", ""),
    ({"error": "RuntimeError: no", "met": [], "log": []},
     "maybe_compile let a failure of the compiler through: RuntimeError: no", ""),
    ({"met": [1, 0]}, "nothing was proven: the model met no outage, because nothing of it was to be compiled",
     "attempts with and without a sample batch: [1, 0]"),
    ({"met": [0, 1], "original": False}, "nothing was proven: the model met no outage, because nothing of it was to be "
     "compiled", "attempts with and without a sample batch: [0, 1]"),
    ({"original": False}, "with a sample batch that does not compile, maybe_compile returned something else than the "
     "model", ""),
    ({"changed": ["inner.weight", "calls"]}, "the failed attempt left 2 thing(s) changed", "inner.weight\ncalls"),
    ({"differs": ["output: differs"]}, "after the fallback, output: differs",
     "beside the same call of the eager model"),
    ({"log": ["fallback_eager"]}, "the log says fallback_eager; expected fallback_eager for each attempt", ""),
    ({"log": []}, "the log says nothing; expected fallback_eager for each attempt", ""),
    ({"log": ["fallback_eager", "compiled"]},
     "the log says fallback_eager, compiled; expected fallback_eager for each attempt", ""),
])  # fmt: skip
def test_the_fallback_of_a_cell(changes, message, evidence):
    """What maybe_compile let through, did not meet, returned, left changed, computed, and logged."""
    judge_it = load("safe_fallback").judge
    assert not list(judge_it(FALLBACK, {}))
    (problem,) = judge_it(FALLBACK | changes, {})
    assert (problem.message, problem.evidence) == (message, evidence)


def test_a_fallback_that_is_wrong_in_every_way():
    """One problem does not hide the next; of several differences each is one."""
    wrong = {"original": False, "changed": ["a"], "differs": ["b: differs", "c: differs"], "log": []}
    assert len(list(load("safe_fallback").judge(FALLBACK | wrong, {}))) == 5


STABLE = {"raised": None, "sizes": 2, "calls": 4, "late": [], "between": [], "unpadded": ""}
COVERED = {"dim": "S", "least": 2, "most": 32, "largest": 32, "graphs": 2}
PADDED = {"dim": "S", "length": 5, "bucket": 8, "graphs": 1, "compiles": [], "error": None}
LATE = {"function": "forward", "file": "m.py", "line": 3, "compile_id": "0/1", "kind": "recompile", "cause": "shape",
        "reason": "size mismatch", "what": "x.size(0)", "expected": "4", "actual": "8", "during": "call 1, again"}
FIRST = LATE | {"kind": "first", "cause": "", "reason": ""}


@pytest.mark.parametrize(("changes", "message", "evidence"), [
    ({"raised": "InductorError", "calls": 0}, "nothing to judge: the compiled run raised InductorError", ""),
    ({"calls": 0}, "nothing to judge: no size was run a second time", ""),
    ({"late": [LATE]}, "forward is compiled again in call 1, again, after all 2 size(s) were met",
     "m.py:3  shape: size mismatch"),
    ({"covered": [COVERED | {"largest": 40}]}, "S=33 to 40 fit no bucket: the largest is 32", ""),
    ({"between": [PADDED, PADDED | {"error": "RuntimeError in forward: no", "graphs": 0}]},
     "S=5, padded to 8: the compiled model raised RuntimeError in forward: no", ""),
    ({"between": [PADDED | {"graphs": 0}]}, "S=5, padded to 8: nothing of it ran compiled", ""),
    ({"between": [PADDED | {"compiles": [LATE]}]},
     "forward is compiled for S=5, padded to 8, after the bucket itself was met", "m.py:3  shape: size mismatch"),
    ({"between": [PADDED | {"compiles": [FIRST]}]},
     "forward is compiled for S=5, padded to 8, after the bucket itself was met", "m.py:3  a first compile"),
])  # fmt: skip
def test_the_shapes_of_a_cell(changes, message, evidence):
    """Nothing may be compiled once every size was met, between two buckets neither."""
    judge_it = load("shape_stability").judge
    assert not list(judge_it(STABLE | {"between": [PADDED], "covered": [COVERED]}, {}))
    (problem,) = judge_it(STABLE | changes, {})
    assert (problem.message, problem.evidence) == (message, evidence)
    assert ("mark_dynamic" in problem.hint) is ("shape: size" in evidence)
    assert (problem.file, problem.line) == (("m.py", 3) if evidence else ("", 0))


def test_late_recompiles_can_be_allowed():
    """The limit is how many there may be; beyond it each is told."""
    judge_it = load("shape_stability").judge
    assert not list(judge_it(STABLE | {"late": [LATE]}, {"late_recompiles": 1}))
    problems = list(judge_it(STABLE | {"late": [LATE, LATE]}, {"late_recompiles": 1}))
    assert [problem.message for problem in problems] == [
        "forward is compiled again in call 1, again, after all 2 size(s) were met (2 times, 1 allowed)"] * 2


def _rank(*compiles, **more):
    """The section ``rank_divergence`` of one rank."""
    return {"raised": None, "graphs": 1, "runs": 4, "graph_breaks": 0, "compiles": list(compiles),
            "collectives": {"group of 2": 7}} | more


def _compile(during="call 1", **more):
    return {"during": during, "function": "Net.forward", "file": "m.py", "line": 3, "compile_id": "0/0",
            "kind": "first", "cause": "", "reason": ""} | more


AGAIN = {"kind": "recompile", "cause": "shape", "reason": "size mismatch", "compile_id": "0/1"}


@pytest.mark.parametrize(("ranks", "alike", "text"), [
    ([_rank(_compile()), _rank(_compile())], True, ""),
    ([_rank(_compile()), _rank(_compile(), _compile("call 2", **AGAIN))], True,
     "rank 1 compiled otherwise than rank 0 in call 2: 1 and 0 compile(s)"),
    ([_rank(_compile()), _rank(_compile(compile_id="0/1"))], True, "rank 1 compiled otherwise than rank 0 in call 1"),
    ([_rank(_compile(ops=11)), _rank(_compile(ops=12))], True, "rank 1 compiled otherwise than rank 0 in call 1"),
    ([_rank(_compile(ops=11)), _rank(_compile(ops=12))], False, ""),
    ([_rank(_compile()), _rank(_compile(), runs=5)], True,
     "the ranks differ in their number of runs of compiled graphs: rank 0 has 4, rank 1 has 5"),
    ([_rank(_compile()), _rank(_compile(), graphs=2)], True, "their number of graphs: rank 0 has 1, rank 1 has 2"),
    ([_rank(_compile()), _rank(_compile(), collectives={"group of 2": 8})], True,
     "different numbers of collectives: rank 0: 7 in group of 2; rank 1: 8 in group of 2"),
    ([_rank(_compile()), _rank(_compile("call 2", function="Other.forward"), runs=9)], False, ""),
    ([_rank(_compile()), _rank(_compile("call 2", **AGAIN))], False, "rank 1 compiled otherwise than rank 0 in call 2"),
    ([_rank(_compile()), None], True, "nothing to judge: rank 1 has recorded nothing"),
    ([_rank(graphs=0), _rank(graphs=0)], True, "nothing to judge: no rank has compiled a graph"),
    ([_rank(_compile())], True, "nothing to judge: the observation is not of several ranks"),
])  # fmt: skip
def test_ranks_that_compile_otherwise(ranks, alike, text):
    """Of ranks that run one program everything agrees; of stages of a pipeline all compile again, or none."""
    found = [problem.message for problem in load("rank_divergence").judge({"ranks": ranks, "alike": alike}, {})]
    assert any(text in message for message in found) if text else found == []


def _two_ranks(**more):
    """An observation of two ranks, the second of which compiled once more."""
    sections = {"compiles": section(), "graph_breaks": {"raised": None, "graphs": 1, "graph_breaks": []},
                "rank_divergence": {"alike": True, "ranks": [_rank(_compile()), _rank(_compile(), graphs=2)]}}
    return Observation("c", sections, ranks=[{"failure": None, "sections": sections}], **more)


def test_what_ranks_differ_in_is_no_single_rank_s():
    """The check that compares ranks names them itself; its problems are not said to be those of rank 0."""
    (problem,) = judge(_two_ranks(), ["rank_divergence"], {})["rank_divergence"].problems
    assert problem.message.startswith("the ranks differ in their number of graphs: rank 0 has 1, rank 1 has 2")


@pytest.mark.parametrize(("several", "hint"), [(False, "--compile-inprocess"), (True, "TORCH_LOGS_OUT=torch.log")])
def test_a_hint_that_can_be_followed(several, hint):
    """Cells of several ranks do not run in pytest's own process, so after a crash nobody is sent there."""
    failure = Failure("crash", "rank 1: the process ended by SIGSEGV")
    seen = _two_ranks(failure=failure) if several else Observation("c", failure=failure)
    (problem,) = judge(seen, ["compiles"], {})["compiles"].problems
    assert hint in problem.hint
    assert ("--compile-inprocess" in problem.hint) is not several
